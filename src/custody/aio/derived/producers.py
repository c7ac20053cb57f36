"""`Producers` of engine/producers.py for asyncio. Made by scripts/async_surface.py: do not edit."""

from __future__ import annotations

from typing import Annotated

from custody.aio.derived.producer import IdempotentProducer
from custody.aio.derived.publishing import Publishing
from custody.aio.derived.transactions import Transactions
from custody.bridge import run
from custody.model.entities import Producer
from custody.wire.fields import Help, Name, Positive


class Producers(Publishing):
    """Producers by their id."""

    async def producer(self, producer_id: str) -> Producer:
        """The epoch, last sequence and last receipt of an idempotent producer, to look up after a lost answer."""
        return await run(lambda: self._of.producer(producer_id))

    async def new_epoch(self, producer_id: Name, *, idempotent: bool = True) -> Producer:
        """Becomes this producer, with a new epoch and sequence 0. Older instances are fenced.

        Every producer is idempotent; the argument `idempotent` exists for clients that send it.
        """
        return await run(lambda: self._of.new_epoch(producer_id, idempotent=idempotent))

    async def init_producer(self, producer_id: str) -> IdempotentProducer:
        """Becomes this producer, with a new epoch and sequence 0. Older instances are fenced."""
        return IdempotentProducer(await run(lambda: self._of.init_producer(producer_id)))

    async def forget_producer(
        self,
        producer_id: str,
        *,
        epoch: Annotated[Positive | None, Help("Only if this is still the current epoch.")] = None,
    ) -> bool:
        """Forgets a producer that will not come back. False if there is none with this id.

        Its last publishes are then no longer recognised as repeats. With `epoch`, refused if there is a newer instance
        (`producer_fenced`). Refused while the producer has an open transaction (`producer_in_use`).
        """
        return await run(lambda: self._of.forget_producer(producer_id, epoch=epoch))

    @property
    def transactions(self) -> Transactions:
        """The verbs of transactions by id. `init_producer(…).transaction()` is the usual way to use them."""
        return Transactions(self._of.transactions)
