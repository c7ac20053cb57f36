"""Random publishes, plain, conditional and idempotent: offsets stay dense, and a repeat returns the first receipts."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

import custody
from custody.errors import InvalidArgument, OffsetConflict, ProducerFenced, SequenceConflict
from custody.model.placement import partition_for

if TYPE_CHECKING:
    from tests.conftest import Clock

EXAMPLES = int(os.environ.get("CUSTODY_PROPERTY_EXAMPLES", "10"))
STEPS = int(os.environ.get("CUSTODY_PROPERTY_STEPS", "40"))

KEYS = ("a", "b", "c", None)
_names = itertools.count()

Batch = list[tuple[str | None, int]]
"""Key and payload of each message."""
batches = st.lists(st.tuples(st.sampled_from(KEYS), st.integers(0, 9)), min_size=1, max_size=40)


@dataclass
class ProducerModel:
    epoch: int
    sent: list[tuple[str, int, int]] = field(default_factory=list)
    """(topic, partition, offset) of each message, by its sequence."""


class Log(RuleBasedStateMachine):
    """Two topics with two partitions each, and two idempotent producers that write to both."""

    def __init__(self, c: custody.Custody, clock: Clock) -> None:
        super().__init__()
        self.c, self.clock = c, clock
        self.run = next(_names)
        self.topics = [f"log-{self.run}-{n}" for n in range(2)]
        self.log: dict[tuple[str, int], Batch] = {(topic, p): [] for topic in self.topics for p in range(2)}
        self.producers: dict[str, ProducerModel] = {}

    @initialize()
    def create(self) -> None:
        for topic in self.topics:
            self.c.create_topic(topic, partitions=2)

    def teardown(self) -> None:
        for topic in self.topics:
            self.c.delete_topic(topic)

    def _outgoing(self, batch: Batch) -> list[custody.Outgoing]:
        return [custody.Outgoing(payload, key=key) for key, payload in batch]

    def _appended(self, topic: str, batch: Batch, receipts: list[custody.Receipt]) -> None:
        """The receipts go on where each partition ended, in the order of the batch, each key to its own partition."""
        for (key, payload), receipt in zip(batch, receipts, strict=True):
            log = self.log[topic, receipt.partition]
            assert (receipt.topic, receipt.offset, receipt.duplicate) == (topic, len(log), False)
            assert key is None or receipt.partition == partition_for(key, 2)
            log.append((key, payload))

    @rule(seconds=st.sampled_from((-5, 1, 60)))
    def move_clock(self, seconds: int) -> None:
        """A clock may also be set back."""
        self.clock.move(seconds)

    @rule(topic=st.integers(0, 1), batch=batches, times=st.sampled_from((1, 1, 10)))
    def publish(self, topic: int, batch: Batch, times: int) -> None:
        """Small batches by INSERT, large ones by COPY."""
        name, batch = self.topics[topic], batch * times
        self._appended(name, batch, self.c.publish_many(name, self._outgoing(batch)))

    @rule(topic=st.integers(0, 1), partition=st.integers(0, 1), off=st.integers(-1, 1), times=st.sampled_from((1, 70)))
    def publish_expecting(self, topic: int, partition: int, off: int, times: int) -> None:
        """The partition takes it exactly if it ends where the producer thinks."""
        name = self.topics[topic]
        batch: Batch = [(None, 1)] * times
        messages = [custody.Outgoing(payload, partition=partition) for _, payload in batch]
        tail = len(self.log[name, partition])
        if off == 0:
            receipts = self.c.publish_many(name, messages, expected_offset=tail)
            assert {receipt.partition for receipt in receipts} == {partition}
            self._appended(name, batch, receipts)
        else:
            with pytest.raises((OffsetConflict, InvalidArgument)):
                self.c.publish_many(name, messages, expected_offset=tail + off)

    @rule(who=st.sampled_from(("p", "q")))
    def take_over(self, who: str) -> None:
        """A new epoch starts at sequence 0 and fences the old one."""
        identity = f"{who}-{self.run}"
        taken = self.c.init_producer(identity)
        old = self.producers.get(who)
        assert taken.epoch == (old.epoch + 1 if old else 1)
        assert taken.next_sequence == 0
        self.producers[who] = ProducerModel(taken.epoch)
        if old:
            with pytest.raises(ProducerFenced):
                self._send(who, 0, [(None, 0)], len(old.sent), epoch=old.epoch)

    def _send(
        self, who: str, topic: int, batch: Batch, sequence: int, epoch: int | None = None
    ) -> list[custody.Receipt]:
        return self.c.publish_many(
            self.topics[topic],
            self._outgoing(batch),
            producer_id=f"{who}-{self.run}",
            epoch=epoch or self.producers[who].epoch,
            sequence=sequence,
        )

    @rule(who=st.sampled_from(("p", "q")), topic=st.integers(0, 1), batch=batches, back=st.integers(-2, 15))
    def publish_idempotent(self, who: str, topic: int, batch: Batch, back: int) -> None:
        """What was sent before comes back as it was, the rest is appended, and a gap, or another topic, is refused."""
        if who not in self.producers:
            self.take_over(who)
        producer = self.producers[who]
        sequence = max(len(producer.sent) - back, 0)
        known = producer.sent[sequence : sequence + len(batch)]
        if sequence > len(producer.sent) or any(sent[0] != self.topics[topic] for sent in known):
            with pytest.raises(SequenceConflict):
                self._send(who, topic, batch, sequence)
            return
        receipts = self._send(who, topic, batch, sequence)
        for sent, receipt in zip(known, receipts[: len(known)], strict=True):
            assert (receipt.topic, receipt.partition, receipt.offset, receipt.duplicate) == (*sent, True)
        self._appended(self.topics[topic], batch[len(known) :], receipts[len(known) :])
        producer.sent += [(receipt.topic, receipt.partition, receipt.offset) for receipt in receipts[len(known) :]]

    @invariant()
    def dense(self) -> None:
        """Every partition holds what was acknowledged, once, from 0 on without a gap, and its times never go back."""
        for (topic, partition), expected in self.log.items():
            messages = self.c.read(topic, partition, max_messages=len(expected) + 10)
            assert [message.offset for message in messages] == list(range(len(expected)))
            assert [(message.key, message.payload) for message in messages] == expected
            times = [message.published_at for message in messages]
            assert times == sorted(times)

    @invariant()
    def remembered(self) -> None:
        """After a lost answer a producer can ask where it stands."""
        for who, producer in self.producers.items():
            state = self.c.producer(f"{who}-{self.run}")
            assert (state.epoch, state.last_sequence) == (producer.epoch, len(producer.sent) - 1)
            last = state.last_receipt
            assert (last and (last.topic, last.partition, last.offset)) == (
                producer.sent[-1] if producer.sent else None
            )


@pytest.mark.core
@pytest.mark.req("G11", "C7", "C8")
def test_random_publishes(c: custody.Custody, clock: Clock) -> None:
    """Offsets are dense and receipts stable, whatever is sent, repeated, refused or fenced."""
    run_state_machine_as_test(
        lambda: Log(c, clock),  # type: ignore[arg-type]  # whatever makes one will do
        settings=settings(
            max_examples=max(1, EXAMPLES // 2),
            stateful_step_count=STEPS,
            deadline=None,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
