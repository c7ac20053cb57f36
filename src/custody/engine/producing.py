"""Producers with an identity: idempotent publishing, and transactions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from custody.engine.publishing import Publishing
from custody.engine.transactions import DirectTransactions
from custody.model.entities import Delayed, Producer, Receipt
from custody.verbs.producer import IdempotentProducer
from custody.verbs.transactions import Transactions
from custody.wire.answers import ChangedOut, ProducerOut
from custody.wire.fields import Help, Positive
from custody.wire.verb import verb


class Producing(Publishing):
    """Producers by their id."""

    @verb("GET", "/producers/{producer_id}", tag="producers", right="produce", answer=ProducerOut)
    def producer(self, producer_id: str) -> Producer:
        """Where an idempotent producer stands: the way out after a publish whose answer was lost."""
        row = self._rows("producer_state", producer=producer_id)[0]
        receipt: Receipt | Delayed | None = None
        if row["deliver_at"] is not None:
            receipt = Delayed(
                topic=row["topic"], partition=row["partition"], delay_id=row["offset"], deliver_at=row["deliver_at"]
            )
        elif row["offset"] is not None:
            receipt = Receipt(row["topic"], row["partition"], row["offset"])
        return _producer(row, receipt)

    def init_producer(self, producer_id: str) -> IdempotentProducer:
        """Takes over as this producer: a new epoch, sequence 0; older instances are fenced from now on."""
        state = _producer(self._rows("init_producer", producer=producer_id)[0], None)
        return IdempotentProducer(state, self.publish_many, self.publish_delayed, self.transactions)

    @verb("DELETE", "/producers/{producer_id}", tag="producers", right="produce", answer=ChangedOut, thread="quick")
    def forget_producer(
        self, producer_id: str, *, epoch: Annotated[Positive | None, Help("Only if this is still the epoch.")] = None
    ) -> bool:
        """Drops what is remembered of a producer that will not come back; False if there is none of that name.

        Its last publishes cannot be repeated any more. With `epoch` a newer instance is left alone
        (`producer_fenced`); while it has an open transaction it is refused (`producer_in_use`).
        """
        return bool(self._value("forget_producer", producer=producer_id, epoch=epoch))

    @property
    def transactions(self) -> Transactions:
        """The verbs of transactions by their ids; `init_producer(…).transaction()` is the usual way."""
        return DirectTransactions(
            db=self._db,
            layout_of=self._layout_of,
            forget=self._forget,
            committed=self.hint,
            worker=self.worker,
            clock=self._clock,
        )


def _producer(row: Mapping[str, Any], receipt: Receipt | Delayed | None) -> Producer:
    return Producer(
        producer_id=row["producer_id"], epoch=row["epoch"], last_sequence=row["last_sequence"], last_receipt=receipt
    )
