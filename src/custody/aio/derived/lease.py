"""`Lease` of verbs/claim.py for asyncio. Made by scripts/async_surface.py: do not edit."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any
from uuid import UUID

from custody.aio.live import LiveLease, give_back
from custody.bridge import run
from custody.model.entities import Message, Settled
from custody.model.outcomes import Outcome
from custody.model.policy import Duration
from custody.verbs.claim import Which


class Lease(LiveLease):
    """Messages that a worker holds until the deadline, to be settled one by one or all at once.

    Without messages it is falsy, and `reason` is `empty`, `busy`, `paused`, `breaker_open`, or the limit that was
    reached. If its claim settled another lease first, `settled` is the answer, and `lost` a LeaseLost if that lease
    no longer held all its messages.
    """

    @property
    def lease_id(self) -> UUID:
        return self._of.lease_id

    @property
    def deadline(self) -> datetime:
        return self._of.deadline

    async def ack(self, *messages: Which, connection: Any = None) -> Settled:
        """Marks messages as done: these, or all that are not settled."""
        return await run(lambda: self._of.ack(*messages, connection=connection))

    async def nack(
        self,
        *messages: Which,
        error: str | BaseException | None = None,
        delay: Duration | None = None,
        requeue: bool = True,
        connection: Any = None,
    ) -> Settled:
        """Marks messages as failed. They are retried by the policy, or after `delay`. They are dead at the limit of the
        policy, or at once with `requeue=False`. Of an exception, the end of its traceback is kept, too."""
        return await run(
            lambda: self._of.nack(*messages, error=error, delay=delay, requeue=requeue, connection=connection)
        )

    async def release(self, *messages: Which, connection: Any = None) -> Settled:
        """Gives messages back: they are ready at once, and the delivery does not count as an attempt."""
        return await run(lambda: self._of.release(*messages, connection=connection))

    async def later(self, *messages: Which, after: Duration, connection: Any = None) -> Settled:
        """Postpones messages: they are ready again after that time, and the delivery does not count as an attempt."""
        return await run(lambda: self._of.later(*messages, after=after, connection=connection))

    async def skip(self, *messages: Which, reason: str | None = None, connection: Any = None) -> Settled:
        """Skips messages that are not needed: they count as done, and the journal has the reason."""
        return await run(lambda: self._of.skip(*messages, reason=reason, connection=connection))

    async def next(self, outcomes: Mapping[int, Outcome] | None = None) -> Lease:
        """Acks what was not settled, and claims again as this lease was claimed: one transaction, one round trip.

        With `outcomes` it settles instead the messages that they name by offset, as `Custody.settle` does. `settled`
        and `lost` of the new lease are the answer to that. If the claim is refused, nothing is settled.
        """
        return Lease(await run(lambda: self._of.next(outcomes), undo=give_back))

    async def extend(self, timeout: Duration | None = None, *, message: Message | None = None) -> datetime:
        """Sets the deadline to now plus the timeout, for the lease or for one of its messages.

        In an ordered group the other messages of its key in the lease are extended too.
        """
        return await run(lambda: self._of.extend(timeout, message=message))
