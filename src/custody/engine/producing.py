"""Producers with an identity: idempotent publishing, and transactions."""

from __future__ import annotations

from custody import producer
from custody.engine.publishing import Publishing
from custody.model import Producer
from custody.producer import IdempotentProducer
from custody.transactions import Transactions


class Producing(Publishing):
    """Producers by their id."""

    def producer(self, producer_id: str) -> Producer:
        """Where an idempotent producer stands: the way out after a publish whose answer was lost."""
        return producer.producer_state(self._db, producer_id)

    def init_producer(self, producer_id: str) -> IdempotentProducer:
        """Takes over as this producer: a new epoch, sequence 0; older instances are fenced from now on."""
        state = producer.init_producer(self._db, producer_id, now=self._now())
        return IdempotentProducer(state, self.publish_many, self.publish_delayed, self.transactions)

    def forget_producer(self, producer_id: str, *, epoch: int | None = None) -> bool:
        """Drops what is remembered of a producer that will not come back; False if there is none of that name.

        Its last publishes cannot be repeated any more. With `epoch` a newer instance is left alone
        (`producer_fenced`); while it has an open transaction it is refused (`producer_in_use`).
        """
        return producer.forget_producer(self._db, producer_id, epoch=epoch, now=self._now())

    @property
    def transactions(self) -> Transactions:
        """The verbs of transactions by their ids; `init_producer(…).transaction()` is the usual way."""
        return Transactions(
            db=self._db,
            layout_of=self._layout_of,
            forget=self._forget,
            committed=self.hint,
            worker=self.worker,
            clock=self._clock,
        )
