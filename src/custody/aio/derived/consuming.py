"""`Consuming` of engine/consuming.py for asyncio. Made by scripts/async_surface.py: do not edit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Annotated
from uuid import UUID

from custody.aio.derived.lease import Lease
from custody.aio.derived.schedules import Schedules
from custody.aio.derived.settle import SettleVerbs
from custody.aio.derived.topics import Topics
from custody.aio.live import blocking, give_back
from custody.bridge import run
from custody.model.entities import Settled
from custody.model.outcomes import Outcome
from custody.model.policy import Duration
from custody.verbs.pipelines import PipelineState
from custody.wire.fields import Help


class Consuming(SettleVerbs, Schedules, Topics):
    """Claiming and settling messages."""

    async def claim(
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
        return Lease(
            await run(
                lambda: self._of.claim(
                    topic,
                    group,
                    max_messages=max_messages,
                    visibility_timeout=visibility_timeout,
                    partition=partition,
                    settle=blocking(settle),
                    outcomes=outcomes,
                ),
                undo=give_back,
            )
        )

    async def settle(self, lease_id: UUID, outcomes: Mapping[int, Outcome] | Outcome) -> Settled:
        """Settles messages of a lease, each with its own outcome, by offset, or all that are not settled with one."""
        return await run(lambda: self._of.settle(lease_id, outcomes))

    async def extend(self, lease_id: UUID, timeout: Duration | None = None, *, offset: int | None = None) -> datetime:
        """Sets the deadline to now plus the timeout, for the lease or one of its messages."""
        return await run(lambda: self._of.extend(lease_id, timeout, offset=offset))

    async def listen(self, topic: str, wake: Callable[[], None]) -> Callable[[], None]:
        """Calls `wake` soon after each publish to the topic, from another thread. Returns a function that ends it."""
        return await run(lambda: self._of.listen(topic, wake))

    async def pipelines(
        self,
        topic: Annotated[str | None, Help("Only this topic.")] = None,
        group: Annotated[str | None, Help("Only this group.")] = None,
    ) -> list[PipelineState]:
        """The states of the pipelines of the database: running, retrying, stopped, failed or gone, and since when."""
        return await run(lambda: self._of.pipelines(topic, group))
