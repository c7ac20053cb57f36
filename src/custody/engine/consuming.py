"""The lifecycle: claim and settle, and what runs both in a loop: workers and pipelines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Annotated, Any
from uuid import UUID

from custody.engine.schedules import Schedules
from custody.engine.sharing import SharingSettler
from custody.engine.topics import Topics
from custody.model.entities import Settled
from custody.model.outcomes import Outcome
from custody.model.policy import Duration, seconds_or_none
from custody.store.postgres import Connection
from custody.verbs import claim, pipelines
from custody.verbs.claim import Lease
from custody.verbs.pipelines import Driver, DriverVerbs, Figures, PassLimit, PipelineState
from custody.verbs.settle import DirectSettler, Settler, SettleVerbs
from custody.wire.fields import Help
from custody.wire.verb import composed
from custody.worker import Worker, WorkerSummary
from custody.worker.handler_runner import Handler
from custody.worker.signals import stopped_by_signals


class Consuming(SettleVerbs, Schedules, Topics):
    """Claiming and settling messages."""

    def claim(
        self,
        topic: str,
        group: str,
        *,
        max_messages: int = 1,
        visibility_timeout: Duration | None = None,
        partition: int | None = None,
        settle: Lease | UUID | None = None,
        outcomes: Mapping[int, Outcome] | None = None,
    ) -> Lease:
        """Leases up to `max_messages` of one partition. An empty lease is falsy and has a `reason`.

        With `settle` it first acks what is left of that lease, in the same transaction. With `outcomes` it settles
        instead the messages of that lease that they name by offset; it has to be a lease of the same group. See
        `Lease.next`.
        """
        return claim.claim(
            self._db,
            self._settler(),
            topic,
            group,
            max_messages=max_messages,
            visibility_timeout=visibility_timeout,
            partition=partition,
            settle=settle,
            outcomes=outcomes,
        )

    def _settler(self, connection: Connection | None = None) -> Settler:
        if self._shared is not None:
            return SharingSettler(db=self._db, connection=connection, acks=self._shared.acks)
        return DirectSettler(db=self._db, connection=connection)

    @composed
    def settle(self, lease_id: UUID, outcomes: Mapping[int, Outcome] | Outcome) -> Settled:
        """Settles messages of a lease, each with its own outcome, by offset, or all that are not settled with one."""
        return self._settler().settle(lease_id, outcomes)

    @composed
    def extend(self, lease_id: UUID, timeout: Duration | None = None, *, offset: int | None = None) -> datetime:
        """Sets the deadline to now plus the timeout, for the lease or one of its messages."""
        return self._settler().extend(lease_id, timeout, offset)

    @composed
    def work(
        self,
        topic: str,
        group: str,
        handler: Handler,
        *,
        payload: type | None = None,
        concurrency: int = 8,
        max_messages: int | None = None,
        visibility_timeout: Duration | None = None,
        poll: Duration = "1s",
        grace: Duration = "30s",
    ) -> WorkerSummary:
        """Claims messages, calls the handler and settles, until SIGTERM or Ctrl-C. Keys run in parallel, each in order.

        The handler is a function or a coroutine function of one message. A message is done when it returns, and has
        failed when it raises; exceptions such as `Dead` say more. With `payload` its message has a payload of that type
        (see `custody.handler`). Leases are extended while handlers run, up to
        `handler_timeout`. A stop gives running handlers `grace` to finish and releases the rest. `worker_for` returns a
        worker instead of running it.
        """
        worker = self.worker_for(
            topic,
            group,
            handler,
            payload=payload,
            concurrency=concurrency,
            max_messages=max_messages,
            visibility_timeout=visibility_timeout,
            poll=poll,
            grace=grace,
        )
        with stopped_by_signals(worker.stop):
            return worker.run()

    def worker_for(self, topic: str, group: str, handler: Handler, **settings: Any) -> Worker:
        """A worker that you run in a thread of yours and stop with `stop()`. It takes the settings of `work`.

        From now on threads of this client share commits, as with `share_commits` of `connect`.
        """
        self._share_commits()
        return Worker(self, topic, group, handler, **settings)

    def listen(self, topic: str, wake: Callable[[], None]) -> Callable[[], None]:
        """Calls `wake` soon after each publish to the topic, from another thread. Returns a function that ends it."""
        return self._listening.add(topic, wake)

    def drive(
        self, topic: str, group: str, *, visibility_timeout: Duration | None = None, after: int | None = None
    ) -> tuple[DriverVerbs, PassLimit]:
        """Takes over a group as the driver of its pipeline, which claims numbered batches and commits them together
        with what they publish.

        The previous driver is fenced (`pipeline_fenced`), and this one takes over its claim. With `after`, this driver
        is fenced instead unless the previous one had that epoch. See `custody.spark`.
        """
        visibility = seconds_or_none(visibility_timeout)
        return pipelines.start(self._db, topic, group, driver=self.worker, visibility=visibility, after=after)

    def figures(self, topic: str, group: str) -> Figures:
        """Figures of a pipeline's group, and the result of its last batch."""
        return pipelines.figures(self._db, topic, group)

    def pipelines(
        self,
        topic: Annotated[str | None, Help("Only this topic.")] = None,
        group: Annotated[str | None, Help("Only this group.")] = None,
    ) -> list[PipelineState]:
        """The states of the pipelines of the database: running, retrying, stopped, failed or gone, and since when."""
        return pipelines.states(self._db, topic, group)

    def driver_verbs(self, driver: Driver) -> DriverVerbs:
        """The verbs of a driver that has taken over already, for another of its processes."""
        return DriverVerbs(self._db, driver)
