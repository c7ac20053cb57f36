"""`Transactions` of verbs/transactions.py for asyncio. Made by scripts/async_surface.py: do not edit."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from uuid import UUID

from custody.aio.live import LiveTransactions
from custody.bridge import run
from custody.model.entities import Delayed, OpenTransaction, Outgoing, Receipt
from custody.wire.fields import GivenTimeout, Name, Offset, Positive, Reason


class Transactions(LiveTransactions):
    """The verbs of transactions by id. Used by `Transaction`, and by other processes that know the id."""

    async def begin(
        self, producer_id: Name, *, epoch: Positive | None = None, timeout: GivenTimeout | None = None
    ) -> tuple[UUID, datetime]:
        """Begins a transaction. Returns its id and the time of its end.

        It is aborted after its timeout (default: 60 s), and when a newer instance of the producer takes over. The epoch
        is by default the current one of the producer.
        """
        return await run(lambda: self._of.begin(producer_id, epoch=epoch, timeout=timeout))

    async def add_all(
        self, transaction_id: UUID, messages: Sequence[tuple[str, Outgoing]], *, first: int | None = None
    ) -> int:
        """Adds messages of several topics, all or none, in this order. Returns the number of messages in the
        transaction.

        `first` is the number of the first one, so that a repeat adds nothing.
        """
        return await run(lambda: self._of.add_all(transaction_id, messages, first=first))

    async def ack(self, transaction_id: UUID, lease_id: UUID, offsets: Sequence[Offset] | None = None) -> None:
        """Acks these offsets of a lease, or all that are not settled, with the commit. If they are lost, the commit is
        refused."""
        return await run(lambda: self._of.ack(transaction_id, lease_id, offsets))

    async def commit(self, transaction_id: UUID) -> list[Receipt | Delayed]:
        """Makes all of it visible at once. A repeat returns the same receipts."""
        return await run(lambda: self._of.commit(transaction_id))

    async def abort(self, transaction_id: UUID, *, reason: Reason = None) -> bool:
        """Aborts a transaction: none of its messages and acks take effect.

        False if it was already aborted.
        """
        return await run(lambda: self._of.abort(transaction_id, reason=reason))

    async def open(self) -> list[OpenTransaction]:
        """The open transactions, the oldest first. Each times out by itself."""
        return await run(lambda: self._of.open())

    async def require_places(self, topic: str, messages: Sequence[Outgoing]) -> None:
        """Refuses a topic that does not exist, and messages with an invalid partition or priority."""
        return await run(lambda: self._of.require_places(topic, messages))

    async def add(
        self, transaction_id: UUID, topic: str, messages: Sequence[Outgoing], *, first: int | None = None
    ) -> int:
        """`add_all` for one topic."""
        return await run(lambda: self._of.add(transaction_id, topic, messages, first=first))
