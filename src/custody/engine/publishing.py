"""The log: topics, publishing, reading, producers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from functools import partial

from custody import log, producer
from custody.engine.base import Base
from custody.errors import InvalidArgument, TopicChanged
from custody.model import Message, Outgoing, Payload, Producer, Receipt, Topic
from custody.producer import IdempotentProducer


class Publishing(Base):
    """Topics and what is in them."""

    def create_topic(self, name: str, *, partitions: int = 1, max_depth: int | None = None) -> Topic:
        """A new topic. `max_depth` caps what the slowest group has not resolved, for each partition."""
        log.create_topic(self._db, name, partitions=partitions, max_depth=max_depth, now=self._now())
        self._partitions.pop(name, None)
        return self.topic(name)

    def delete_topic(self, name: str) -> None:
        """Removes a topic with its messages and groups, for good."""
        log.delete_topic(self._db, name)
        self._partitions.pop(name, None)

    def topics(self) -> list[Topic]:
        return log.topics(self._db)

    def topic(self, name: str) -> Topic:
        return log.topic(self._db, name)

    def publish(
        self,
        topic: str,
        payload: Payload,
        *,
        key: str | None = None,
        headers: Mapping[str, str] | None = None,
        partition: int | None = None,
        expected_offset: int | None = None,
    ) -> Receipt:
        """Appends one message; it is durable when this returns. `expected_offset` refuses if the partition moved on."""
        message = Outgoing(payload, key=key, headers=headers, partition=partition)
        return self.publish_many(topic, [message], expected_offset=expected_offset)[0]

    def publish_many(
        self,
        topic: str,
        messages: Iterable[Outgoing | Payload],
        *,
        expected_offset: int | None = None,
        producer_id: str | None = None,
        epoch: int | None = None,
        sequence: int | None = None,
    ) -> list[Receipt]:
        """Appends the messages in one transaction: all of them or none, in this order for each partition.

        With `producer_id`, `epoch` and `sequence` (of the first message) a repeat returns the first receipts.
        """
        batch = [message if isinstance(message, Outgoing) else Outgoing(message) for message in messages]
        identity = None
        if producer_id is not None:
            if epoch is None or sequence is None:
                raise InvalidArgument("an idempotent publish needs producer_id, epoch and sequence")
            identity = (producer_id, epoch, sequence)
        publish = partial(
            log.publish, self._db, topic, batch, producer=identity, expected_offset=expected_offset, now=self._now()
        )
        try:
            receipts = publish(partitions=self._partitions_of(topic))
        except TopicChanged:  # since we last looked
            self._partitions.pop(topic, None)
            receipts = publish(partitions=self._partitions_of(topic))
        self._hints.send(topic)
        return receipts

    def _partitions_of(self, topic: str) -> int:
        count = self._partitions.get(topic)
        if count is None:
            count = self._partitions[topic] = self.topic(topic).partitions
        return count

    def hint(self, topics: Iterable[str]) -> None:
        """Wakes those who wait for messages of these topics, after something was published in another way."""
        for topic in topics:
            self._hints.send(topic)

    def read(
        self,
        topic: str,
        partition: int = 0,
        *,
        offset: int | None = None,
        time: datetime | None = None,
        max_messages: int = 100,
    ) -> list[Message]:
        """Messages as they are in the log, from an offset or a time on (else from the first); no group is involved."""
        if time is not None:
            if offset is not None:
                raise InvalidArgument("read takes an offset or a time, not both")
            offset = log.offset_at(self._db, topic, partition, time)
        return log.read(self._db, topic, partition, offset=offset, max_messages=max_messages)

    def producer(self, producer_id: str) -> Producer:
        """Where an idempotent producer stands: the way out after a publish whose answer was lost."""
        return producer.producer_state(self._db, producer_id)

    def init_producer(self, producer_id: str) -> IdempotentProducer:
        """Takes over as this producer: a new epoch, sequence 0; older instances are fenced from now on."""
        return IdempotentProducer(producer.init_producer(self._db, producer_id, now=self._now()), self.publish_many)
