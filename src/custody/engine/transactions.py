"""Transactions of producers, in the database."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from uuid import UUID

from custody.model.codec import Encoded
from custody.model.entities import Delayed, OpenTransaction, Outgoing, Receipt
from custody.model.placement import PLACED_WRONGLY, place
from custody.model.policy import Duration, interval, seconds_or_none
from custody.store import packed
from custody.store.postgres import Connection, Database
from custody.tracing import traced_each
from custody.verbs.transactions import Transactions, encoded


@dataclass(frozen=True, kw_only=True)
class DirectTransactions(Transactions):
    """The verbs of transactions, as calls of SQL functions."""

    db: Database
    committed: Callable[[Iterable[str]], None]

    def begin(
        self, producer_id: str, *, epoch: int | None = None, timeout: Duration | None = None
    ) -> tuple[UUID, datetime]:
        row = self.db.call_dicts("begin_transaction", producer=producer_id, epoch=epoch, timeout=interval(timeout))[0]
        return row["transaction_id"], row["expires_at"]

    def add_all(
        self, transaction_id: UUID, messages: Sequence[tuple[str, Outgoing]], *, first: int | None = None
    ) -> int:
        messages = traced_each(messages)
        bodies = [encoded(message) for _, message in messages]
        try:
            return self._add_all(transaction_id, messages, bodies, first)
        except PLACED_WRONGLY:
            for topic in {topic for topic, _ in messages}:
                self.forget(topic)
            return self._add_all(transaction_id, messages, bodies, first)

    def _add_all(
        self,
        transaction_id: UUID,
        messages: Sequence[tuple[str, Outgoing]],
        bodies: Sequence[Encoded],
        first: int | None,
    ) -> int:
        count, done = first or 0, 0
        runs = [(topic, [one for _, one in run]) for topic, run in groupby(messages, key=lambda one: one[0])]
        with self.db.transaction() if len(runs) > 1 else nullcontext() as connection:
            for topic, some in runs:
                begin = None if first is None else first + done
                count = self._add(transaction_id, topic, some, bodies[done : done + len(some)], begin, connection)
                done += len(some)
        return count

    def _add(
        self,
        transaction_id: UUID,
        topic: str,
        messages: Sequence[Outgoing],
        bodies: Sequence[Encoded],
        first: int | None,
        connection: Connection | None = None,
    ) -> int:
        layout = self.layout_of(topic)
        count: int = self.db.call(
            "add_to_transaction",
            on=connection,
            transaction=transaction_id,
            first=first,
            topic=topic,
            partitions=place(messages, layout),
            named=[message.fixed for message in messages],
            of=layout.partitions,
            **packed.columns(bodies),
            deliver_at=[message.deliver_at for message in messages],
            delays=[seconds_or_none(message.delay) for message in messages],
        )[0][0]
        return count

    def ack(self, transaction_id: UUID, lease_id: UUID, offsets: Sequence[int] | None = None) -> None:
        self.db.call(
            "ack_in_transaction",
            transaction=transaction_id,
            lease_id=lease_id,
            offsets=None if offsets is None else list(offsets),
        )

    def commit(self, transaction_id: UUID) -> list[Receipt | Delayed]:
        rows = self.db.call("commit_transaction", transaction=transaction_id)
        self.committed({row[0] for row in rows})
        return [_receipt(*row) for row in rows]

    def abort(self, transaction_id: UUID, *, reason: str | None = None) -> bool:
        return bool(self.db.call("abort_transaction", transaction=transaction_id, reason=reason)[0][0])

    def open(self) -> list[OpenTransaction]:
        return [OpenTransaction(**row) for row in self.db.call_dicts("open_transactions")]


def _receipt(topic: str, partition: int, number: int, deliver_at: datetime | None) -> Receipt | Delayed:
    if deliver_at is None:
        return Receipt(topic, partition, number)
    return Delayed(topic=topic, partition=partition, delay_id=number, deliver_at=deliver_at)
