"""`SettleVerbs` of verbs/settle.py for asyncio. Made by scripts/async_surface.py: do not edit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from uuid import UUID

from custody.aio.base import Base
from custody.bridge import run
from custody.model.entities import Settled
from custody.model.outcomes import Outcome
from custody.model.policy import Duration


class SettleVerbs(Base):
    """The settle verbs by lease id, for these offsets or for all messages of the lease that are not settled."""

    async def settle(self, lease_id: UUID, outcomes: Mapping[int, Outcome] | Outcome) -> Settled:
        """Settles messages, each with its own outcome, by offset, or all that are not settled with one.

        It is one statement and one commit. It settles what the lease still holds; if it no longer holds all of them,
        it raises LeaseLost with the rest. A repeat of the same settle is a success. In a transaction of the caller it
        is all or nothing.
        """
        return await run(lambda: self._of.settle(lease_id, outcomes))

    async def ack(self, lease_id: UUID, offsets: Sequence[int] | None = None) -> Settled:
        """Marks messages as done."""
        return await run(lambda: self._of.ack(lease_id, offsets))

    async def nack(
        self,
        lease_id: UUID,
        offsets: Sequence[int] | None = None,
        *,
        error: str | None = None,
        delay: Duration | None = None,
        requeue: bool = True,
    ) -> Settled:
        """Marks messages as failed: the policy decides on a retry. With `requeue=False` they are dead at once."""
        return await run(lambda: self._of.nack(lease_id, offsets, error=error, delay=delay, requeue=requeue))

    async def release(self, lease_id: UUID, offsets: Sequence[int] | None = None) -> Settled:
        """Gives messages back: they are ready at once, and the delivery does not count as an attempt."""
        return await run(lambda: self._of.release(lease_id, offsets))

    async def later(self, lease_id: UUID, offsets: Sequence[int] | None = None, *, after: Duration) -> Settled:
        """Postpones messages: they are ready again after that time, and the delivery does not count as an attempt."""
        return await run(lambda: self._of.later(lease_id, offsets, after=after))
