"""Idempotent producers: a repeated publish leaves one message and returns its first receipt."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime

from custody.errors import DatabaseUnavailable
from custody.model import Outgoing, Payload, Producer, Receipt
from custody.store.postgres import Database

Publish = Callable[..., list[Receipt]]


def init_producer(db: Database, producer_id: str, *, now: datetime | None) -> Producer:
    row = db.call_dicts("init_producer", producer=producer_id, now=now)[0]
    return Producer(
        producer_id=row["producer_id"], epoch=row["epoch"], last_sequence=row["last_sequence"], last_receipt=None
    )


def producer_state(db: Database, producer_id: str) -> Producer:
    row = db.call_dicts("producer_state", producer=producer_id)[0]
    receipt = None
    if row["offset"] is not None:
        receipt = Receipt(row["topic"], row["partition"], row["offset"])
    return Producer(
        producer_id=row["producer_id"], epoch=row["epoch"], last_sequence=row["last_sequence"], last_receipt=receipt
    )


class IdempotentProducer:
    """Publishes under one producer id and epoch, and counts the sequence by itself.

    After a publish whose outcome is unknown (the connection was lost) publish the same again, or call `repeat`: what
    had arrived comes back with `duplicate=True`, the rest is published. Publishing something else repeats it first.
    """

    def __init__(self, state: Producer, publish: Publish) -> None:
        self.producer_id = state.producer_id
        self.epoch = state.epoch
        self._publish = publish
        self._next = state.last_sequence + 1
        self._lock = threading.Lock()
        self._unknown: tuple[str, list[Outgoing | Payload]] | None = None

    @property
    def next_sequence(self) -> int:
        return self._next

    def publish(
        self,
        topic: str,
        payload: Payload,
        *,
        key: str | None = None,
        headers: Mapping[str, str] | None = None,
        partition: int | None = None,
    ) -> Receipt:
        return self.publish_many(topic, [Outgoing(payload, key=key, headers=headers, partition=partition)])[0]

    def publish_many(self, topic: str, messages: Iterable[Outgoing | Payload]) -> list[Receipt]:
        batch = list(messages)
        with self._lock:
            if self._unknown is not None and self._unknown != (topic, batch):
                self._send(*self._unknown)
            return self._send(topic, batch)

    def repeat(self) -> list[Receipt]:
        """Sends the publish of unknown outcome again; nothing if there is none."""
        with self._lock:
            return [] if self._unknown is None else self._send(*self._unknown)

    def _send(self, topic: str, messages: list[Outgoing | Payload]) -> list[Receipt]:
        self._unknown = (topic, messages)  # an interrupt, too, leaves it open whether the messages arrived
        try:
            receipts = self._publish(
                topic, messages, producer_id=self.producer_id, epoch=self.epoch, sequence=self._next
            )
        except DatabaseUnavailable:
            raise
        except Exception:
            self._unknown = None
            raise
        self._unknown = None
        self._next += len(messages)
        return receipts
