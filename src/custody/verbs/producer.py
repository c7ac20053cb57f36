"""Idempotent producers: a repeated publish leaves one message and returns its first receipt."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from custody import bridge
from custody.errors import DatabaseUnavailable, InvalidArgument, KeySplit
from custody.model.entities import Delayed, Outgoing, Payload, Producer, Receipt, batch_of
from custody.model.policy import Duration
from custody.verbs.transactions import Transaction, Transactions


def producer_identity(producer_id: str | None, epoch: int | None, sequence: int | None) -> tuple[str, int, int] | None:
    """The identity that makes a publish idempotent; None without one. All three values, or none, must be given."""
    if producer_id is None and epoch is None and sequence is None:
        return None
    if producer_id is None or epoch is None or sequence is None:
        raise InvalidArgument("an idempotent publish needs producer_id, epoch and sequence", "Give all three, or none.")
    return producer_id, epoch, sequence


class IdempotentProducer:
    """Publishes under one producer id and epoch, and counts the sequence itself.

    After a publish with unknown outcome (the connection was lost), publish the same again, or call `repeat`: messages
    that had arrived come back with `duplicate=True`, the others are published. Publishing something else repeats it
    first.
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
        self._lock = bridge.lock()
        self._unknown: tuple[str, list[Outgoing]] | None = None

    @property
    def next_sequence(self) -> int:
        return self._next

    def transaction(self, *, timeout: Duration | None = None) -> Transaction:
        """Begins a transaction: its publishes, to any topics, and its acks become visible together or not at all.

        It is aborted after `timeout` (default: 60 s), and when a newer instance of this producer takes over.
        """
        return Transaction(self._transactions, self.producer_id, self.epoch, timeout)

    def publish(self, topic: str, payload: Payload, **rest: Any) -> Receipt:
        """Publishes one message. Takes the arguments of `Outgoing`: key, headers, partition, routing_key."""
        return self.publish_many(topic, [Outgoing(payload, **rest)])[0]

    def publish_many(self, topic: str, messages: Iterable[Outgoing | Payload]) -> list[Receipt]:
        batch = batch_of(messages)
        if any(message.delayed for message in batch):
            raise InvalidArgument(
                "a delayed message has no offset to return", "Use publish_delayed for delayed messages."
            )
        return self._in_turn(topic, batch)

    def publish_delayed(self, topic: str, messages: Iterable[Outgoing]) -> list[Delayed]:
        """Publishes messages with a `delay` or `deliver_at`; a repeat returns their first ids."""
        batch = list(messages)
        if not all(message.delayed for message in batch):
            raise InvalidArgument("each of the messages needs delay or deliver_at", "Use publish_many for the others.")
        return self._in_turn(topic, batch)

    def repeat(self) -> list[Any]:
        """Repeats the publish with unknown outcome; does nothing if there is none."""
        with self._lock:
            return [] if self._unknown is None else self._send(*self._unknown)

    def _in_turn(self, topic: str, batch: list[Outgoing]) -> list[Any]:
        with self._lock:
            if self._unknown is not None and self._unknown != (topic, batch):
                self._send(*self._unknown)
            return self._send(topic, batch)

    def _send(self, topic: str, batch: list[Outgoing]) -> list[Any]:
        repeated = self._unknown is not None
        self._unknown = (topic, batch)  # after an interrupt, too, it is unknown whether the messages arrived
        publish = self._publish_delayed if batch and batch[0].delayed else self._publish
        try:
            receipts = publish(topic, batch, producer_id=self.producer_id, epoch=self.epoch, sequence=self._next)
        except DatabaseUnavailable:
            raise
        except Exception as error:
            # a topic that has grown refuses a repeat before it is checked whether the first attempt arrived
            if not (repeated and isinstance(error, KeySplit)):
                self._unknown = None
            raise
        self._unknown = None
        self._next += len(batch)
        return list(receipts)
