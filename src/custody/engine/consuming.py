"""The lifecycle: claim, settle, and the loops over both: workers and pipelines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from custody.engine.grouping import Grouping
from custody.engine.topics import Topics
from custody.model.entities import Settled
from custody.model.outcomes import Outcome
from custody.model.policy import Duration, seconds_or_none
from custody.store.notify import Listener
from custody.store.postgres import Connection
from custody.verbs import claim, pipelines
from custody.verbs.claim import Lease
from custody.verbs.pipelines import Drive, Driver, Figures, Pass, PipelineState
from custody.verbs.settle import DirectSettler, Settler
from custody.worker import Worker, WorkerSummary
from custody.worker.calling import Handler
from custody.worker.signals import stopped_by_signals


class Consuming(Grouping, Topics):
    """Claims and what becomes of them."""

    def claim(
        self,
        topic: str,
        group: str,
        *,
        max_messages: int = 1,
        visibility_timeout: Duration | None = None,
        partition: int | None = None,
    ) -> Lease:
        """Up to `max_messages` of one partition under one lease. An empty lease is false and has a `reason`."""
        return claim.claim(
            self._db,
            self._settler(),
            topic,
            group,
            max_messages=max_messages,
            visibility_timeout=visibility_timeout,
            partition=partition,
            worker=self.worker,
            now=self._now(),
        )

    def _settler(self, connection: Connection | None = None) -> Settler:
        return DirectSettler(db=self._db, worker=self.worker, clock=self._clock, connection=connection)

    def ack(self, lease_id: UUID, offsets: Sequence[int] | None = None) -> Settled:
        """Done: these offsets, or all of the lease that are not settled."""
        return self._settler().ack(lease_id, offsets)

    def nack(
        self,
        lease_id: UUID,
        offsets: Sequence[int] | None = None,
        *,
        error: str | None = None,
        delay: Duration | None = None,
        requeue: bool = True,
    ) -> Settled:
        """Failed: tried again by the policy, or dead at once with `requeue=False`."""
        return self._settler().nack(lease_id, offsets, error=error, delay=delay, requeue=requeue)

    def release(self, lease_id: UUID, offsets: Sequence[int] | None = None) -> Settled:
        """Given back: ready at once, and the delivery does not count."""
        return self._settler().release(lease_id, offsets)

    def later(self, lease_id: UUID, offsets: Sequence[int] | None = None, *, after: Duration) -> Settled:
        """Not now: ready again after that time, and the delivery does not count."""
        return self._settler().later(lease_id, offsets, after=after)

    def settle(self, lease_id: UUID, outcomes: Mapping[int, Outcome]) -> Settled:
        """Many outcomes at once, by offset: one statement, one commit."""
        return self._settler().settle(lease_id, outcomes)

    def extend(self, lease_id: UUID, timeout: Duration | None = None, *, offset: int | None = None) -> datetime:
        """Sets the deadline to now plus the timeout, for the lease or one of its messages."""
        return self._settler().extend(lease_id, timeout, offset)

    def work(
        self,
        topic: str,
        group: str,
        handler: Handler,
        *,
        concurrency: int = 8,
        max_messages: int | None = None,
        visibility_timeout: Duration | None = None,
        poll: Duration = "1s",
        grace: Duration = "30s",
    ) -> WorkerSummary:
        """Claims, calls the handler, settles, until stopped by SIGTERM or Ctrl-C: keys in parallel, one key in order.

        The handler is a function or a coroutine function of one message. Returning is done; an exception is a failure;
        `Retry`, `Dead` and `Later` say more. Leases are extended while handlers run, up to `handler_timeout`.
        A stop lets running handlers finish for `grace` and gives back the rest. `worker_for` gives a handle instead.
        """
        worker = self.worker_for(
            topic,
            group,
            handler,
            concurrency=concurrency,
            max_messages=max_messages,
            visibility_timeout=visibility_timeout,
            poll=poll,
            grace=grace,
        )
        with stopped_by_signals(worker.stop):
            return worker.run()

    def worker_for(self, topic: str, group: str, handler: Handler, **settings: Any) -> Worker:
        """A worker to be run in a thread of yours and stopped by its `stop()`; the settings are those of `work`."""
        return Worker(self, topic, group, handler, **settings)

    def listen(self, topic: str, wake: Callable[[], None]) -> Callable[[], None]:
        """Calls `wake` soon after each publish to the topic, from another thread. Returns what ends it."""
        return Listener(self._listen_url, topic, lambda _: wake()).close

    def drive(
        self, topic: str, group: str, *, visibility_timeout: Duration | None = None, after: int | None = None
    ) -> tuple[Drive, Pass]:
        """Takes over a group as its pipeline's driver: claims in numbered batches, commits with what is published.

        Whoever drove it before is fenced (`pipeline_fenced`), and its claim is taken over. With `after` only the driver
        of that epoch may have been before: else it is this one that is fenced. See `custody.spark`.
        """
        visibility = seconds_or_none(visibility_timeout)
        return pipelines.start(
            self._db, topic, group, driver=self.worker, visibility=visibility, after=after, clock=self._clock
        )

    def figures(self, topic: str, group: str) -> Figures:
        """Where a pipeline's group stands, and what its last batch came to."""
        return pipelines.figures(self._db, topic, group, now=self._now())

    def pipelines(self, topic: str | None = None, group: str | None = None) -> list[PipelineState]:
        """What the pipelines of the database are at: running, retrying, stopped, failed or gone, and since when."""
        return pipelines.states(self._db, topic, group, now=self._now())

    def driving(self, driver: Driver) -> Drive:
        """The verbs of a driver that has taken over already, for another process of its own."""
        return Drive(self._db, driver, self._clock)
