"""Idempotent producers: a repeated publish leaves one message and returns its first receipt."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

from custody.errors import DatabaseUnavailable, InvalidArgument, KeySplit
from custody.model.entities import Delayed, Outgoing, Payload, Producer, Receipt, batch_of
from custody.model.policy import Duration
from custody.verbs.transactions import Transaction, Transactions


def producer_identity(producer_id: str | None, epoch: int | None, sequence: int | None) -> tuple[str, int, int] | None:
    """What makes a publish idempotent: all three, or none."""
    if producer_id is None and epoch is None and sequence is None:
        return None
    if producer_id is None or epoch is None or sequence is None:
        raise InvalidArgument("an idempotent publish needs producer_id, epoch and sequence")
    return producer_id, epoch, sequence


class IdempotentProducer:
    """Publishes under one producer id and epoch, and counts the sequence by itself.

    After a publish whose outcome is unknown (the connection was lost) publish the same again, or call `repeat`: what
    had arrived comes back with `duplicate=True`, the rest is published. Publishing something else repeats it first.
    """

    def __init__(
        self,
        state: Producer,
        publish: Callable[..., list[Receipt]],
        publish_delayed: Callable[..., list[Delayed]],
        transactions: Transactions,
    ) -> None:
        self.producer_id = state.producer_id
        self.epoch = state.epoch
        self._publish = publish
        self._publish_delayed = publish_delayed
        self._transactions = transactions
        self._next = state.last_sequence + 1
        self._lock = threading.Lock()
        self._unknown: tuple[str, list[Outgoing]] | None = None

    @property
    def next_sequence(self) -> int:
        return self._next

    def transaction(self, *, timeout: Duration | None = None) -> Transaction:
        """Begins a transaction: what it publishes, to any topics, and acknowledges is seen whole or not at all.

        It is aborted after `timeout` (60 s if none is given), and when a newer instance of this producer takes over.
        """
        return Transaction(self._transactions, self.producer_id, self.epoch, timeout)

    def publish(self, topic: str, payload: Payload, **rest: Any) -> Receipt:
        """One message, with what `Outgoing` takes: key, headers, partition, routing_key."""
        return self.publish_many(topic, [Outgoing(payload, **rest)])[0]

    def publish_many(self, topic: str, messages: Iterable[Outgoing | Payload]) -> list[Receipt]:
        batch = batch_of(messages)
        if any(message.delayed for message in batch):
            raise InvalidArgument("a delayed message has no offset to return", "Use publish_delayed for those.")
        return self._in_turn(topic, batch)

    def publish_delayed(self, topic: str, messages: Iterable[Outgoing]) -> list[Delayed]:
        """Messages that have a `delay` or `deliver_at`; a repeat returns their first ids."""
        batch = list(messages)
        if not all(message.delayed for message in batch):
            raise InvalidArgument("each of the messages needs a delay or a time of delivery")
        return self._in_turn(topic, batch)

    def repeat(self) -> list[Any]:
        """Sends the publish of unknown outcome again; nothing if there is none."""
        with self._lock:
            return [] if self._unknown is None else self._send(*self._unknown)

    def _in_turn(self, topic: str, batch: list[Outgoing]) -> list[Any]:
        with self._lock:
            if self._unknown is not None and self._unknown != (topic, batch):
                self._send(*self._unknown)
            return self._send(topic, batch)

    def _send(self, topic: str, batch: list[Outgoing]) -> list[Any]:
        repeated = self._unknown is not None
        self._unknown = (topic, batch)  # an interrupt, too, leaves it open whether the messages arrived
        publish = self._publish_delayed if batch and batch[0].delayed else self._publish
        try:
            receipts = publish(topic, batch, producer_id=self.producer_id, epoch=self.epoch, sequence=self._next)
        except DatabaseUnavailable:
            raise
        except Exception as error:
            # a topic that has grown refuses a repeat before anybody looks whether the first attempt arrived
            if not (repeated and isinstance(error, KeySplit)):
                self._unknown = None
            raise
        self._unknown = None
        self._next += len(batch)
        return list(receipts)
