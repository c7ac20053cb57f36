"""`Transaction` of verbs/transactions.py for asyncio. Made by scripts/async_surface.py: do not edit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime

from custody.aio.derived.lease import Lease
from custody.aio.live import LiveTransaction, blocking
from custody.bridge import run
from custody.model.entities import Delayed, Outgoing, Payload, Receipt
from custody.model.lanes import Priority
from custody.model.policy import Duration
from custody.verbs.claim import Which


class Transaction(LiveTransaction):
    """Publishes to any topics and acks of one producer, all or nothing.

    As a context manager it commits at the end of the block, and aborts if the block raises. `receipts` are set by the
    commit, in the order of publishing. Use it from one thread.
    """

    async def publish(
        self,
        topic: str,
        payload: Payload,
        *,
        key: str | None = None,
        headers: Mapping[str, str] | None = None,
        partition: int | None = None,
        priority: Priority | None = None,
        routing_key: str | None = None,
        delay: Duration | None = None,
        deliver_at: datetime | None = None,
        allow_split: bool = False,
    ) -> None:
        """Adds one message. Invalid input is refused now; its receipt is known after the commit."""
        return await run(
            lambda: self._of.publish(
                topic,
                payload,
                key=key,
                headers=headers,
                partition=partition,
                priority=priority,
                routing_key=routing_key,
                delay=delay,
                deliver_at=deliver_at,
                allow_split=allow_split,
            )
        )

    async def publish_many(self, topic: str, messages: Iterable[Outgoing | Payload]) -> None:
        return await run(lambda: self._of.publish_many(topic, messages))

    async def ack(self, lease: Lease, *messages: Which) -> None:
        """Acks these messages of the lease, or all that are not settled, with the commit: all of them, or LeaseLost."""
        return await run(lambda: self._of.ack(blocking(lease), *messages))

    async def commit(self) -> list[Receipt | Delayed]:
        """Makes everything visible at once. After a lost connection it is tried once more. It can be called again: a
        repeat returns the same receipts."""
        return await run(lambda: self._of.commit())

    async def abort(self, *, reason: str | None = None) -> None:
        """Drops everything. Does nothing if it was already aborted."""
        return await run(lambda: self._of.abort(reason=reason))
