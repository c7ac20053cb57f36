"""Producers with an identity: idempotent publishing, and transactions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from custody.engine.publishing import Publishing
from custody.engine.transactions import DirectTransactions
from custody.errors import InvalidArgument
from custody.model.entities import Delayed, Producer, Receipt
from custody.verbs.producer import IdempotentProducer
from custody.verbs.transactions import Transactions
from custody.wire.answers import ChangedOut, ProducerOut
from custody.wire.fields import Help, Name, Positive
from custody.wire.verb import composed, verb


class Producers(Publishing):
    """Producers by their id."""

    @verb("GET", "/producers/{producer_id}", tag="producers", right="produce", answer=ProducerOut)
    def producer(self, producer_id: str) -> Producer:
        """The epoch, last sequence and last receipt of an idempotent producer, to look up after a lost answer."""
        row = self._rows("producer_state", producer=producer_id)[0]
        receipt: Receipt | Delayed | None = None
        if row["deliver_at"] is not None:
            receipt = Delayed(
                topic=row["topic"], partition=row["partition"], delay_id=row["offset"], deliver_at=row["deliver_at"]
            )
        elif row["offset"] is not None:
            receipt = Receipt(row["topic"], row["partition"], row["offset"])
        return _producer(row, receipt)

    @verb(
        "POST",
        "/producers/init",
        tag="producers",
        right="produce",
        answer=ProducerOut,
        repeat=True,  # a repeat raises the epoch once more, and the last one counts
        thread="quick",
        operation="init_producer",
        example={"producer_id": "order-service-1"},
    )
    def new_epoch(self, producer_id: Name, *, idempotent: bool = True) -> Producer:
        """Becomes this producer, with a new epoch and sequence 0. Older instances are fenced.

        Every producer is idempotent; the argument `idempotent` exists for clients that send it.
        """
        if not idempotent:
            raise InvalidArgument(
                "a producer is always idempotent",
                "To publish without a producer, leave out producer_id, epoch and sequence.",
                path="$.idempotent",
            )
        return _producer(self._rows("init_producer", producer=producer_id)[0], None)

    @composed
    def init_producer(self, producer_id: str) -> IdempotentProducer:
        """Becomes this producer, with a new epoch and sequence 0. Older instances are fenced."""
        state = self.new_epoch(producer_id)
        return IdempotentProducer(state, self.publish_many, self.publish_delayed, self.transactions)

    @verb("DELETE", "/producers/{producer_id}", tag="producers", right="produce", answer=ChangedOut, thread="quick")
    def forget_producer(
        self,
        producer_id: str,
        *,
        epoch: Annotated[Positive | None, Help("Only if this is still the current epoch.")] = None,
    ) -> bool:
        """Forgets a producer that will not come back. False if there is none with this id.

        Its last publishes are then no longer recognised as repeats. With `epoch`, refused if there is a newer instance
        (`producer_fenced`). Refused while the producer has an open transaction (`producer_in_use`).
        """
        return bool(self._value("forget_producer", producer=producer_id, epoch=epoch))

    @property
    def transactions(self) -> Transactions:
        """The verbs of transactions by id. `init_producer(…).transaction()` is the usual way to use them."""
        return DirectTransactions(
            db=self._db,
            layout_of=self._layout_of,
            forget=self._forget,
            committed=self.hint,
        )


def _producer(row: Mapping[str, Any], receipt: Receipt | Delayed | None) -> Producer:
    return Producer(
        producer_id=row["producer_id"], epoch=row["epoch"], last_sequence=row["last_sequence"], last_receipt=receipt
    )
