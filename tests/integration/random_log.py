"""A topic with a plain list of what is in it: random messages, and every way to append them."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import psycopg
from tests.conftest import Clock

from custody import Custody, Outgoing, Receipt, outbox
from custody.coalesced.publishes import Publish
from custody.engine.server_verbs import ServerVerbs
from custody.model.codec import encode
from custody.model.placement import partition_for

TOPIC, PARTITIONS = "orders", 2
KEYS = ["", "a", "b", "c", "d", "é", "NULL", '{1,"2"}', "it's \\ all", "k" * 2000]
HEADERS: list[dict[str, str]] = [{}, {"n": "1"}, {"quoted": '{"\\",'}, {"é": "null", "": ""}]
COUNTS = [1, 1, 2, 3, 15, 16, 17, 30, 100, 333, 1001]


@dataclass(frozen=True)
class Stored:
    partition: int
    offset: int
    published_at: datetime
    key: str | None
    kind: str
    payload: bytes
    headers: dict[str, str]


def payload_of(dice: random.Random, kind: str, length: str) -> Any:
    if length == "empty":
        return {"j": None, "t": "", "b": b""}[kind]
    if length == "huge" and dice.random() < 0.01:
        return {"j": ["x" * 300_000], "t": "y" * 300_000, "b": b"\0" * 300_000}[kind]
    some = dice.choice([0, 1, 3, 20, 200]) if length != "near" else dice.choice([900, 1000, 1100])
    return {"j": {"n": some, "é": "z" * some}, "t": "é" * (some // 2), "b": dice.randbytes(some)}[kind]


def some_messages(dice: random.Random) -> list[Outgoing]:
    """Messages of one call: what they have in common is drawn first."""
    keys: list[str | None] = dice.choice([[None], ["a"], [*KEYS], [*KEYS, None, None]])
    headers: list[dict[str, str] | None] = dice.choice([[None], [{"n": "2"}], [*HEADERS, None, None]])
    kinds = dice.choice(["j", "t", "b", "jtb"])
    length = dice.choice(["empty", "mixed", "mixed", "near", "huge"])
    spread = dice.random() < 0.5
    to = dice.randrange(PARTITIONS)
    return [
        Outgoing(
            payload_of(dice, dice.choice(kinds), length),
            key=dice.choice(keys),
            headers=dice.choice(headers),
            partition=dice.randrange(PARTITIONS) if spread else to,
            allow_split=True,
        )
        for _ in range(dice.choice(COUNTS))
    ]


@dataclass
class RandomLog:
    c: Custody
    db: psycopg.Connection[Any]
    url: str
    clock: Clock
    dice: random.Random
    log: list[list[Stored]] = field(default_factory=lambda: [[] for _ in range(PARTITIONS)])
    first: list[int] = field(default_factory=lambda: [0] * PARTITIONS)
    groups: list[str] = field(default_factory=list)
    """Of which nothing is left but dead letters."""
    names: Iterator[int] = field(default_factory=itertools.count)

    def stored(self, partition: int, message: Outgoing) -> Stored:
        kind, payload = encode(message.payload)
        offset = len(self.log[partition])
        one = Stored(partition, offset, self.clock(), message.key, kind.decode(), payload, dict(message.headers or {}))
        self.log[partition].append(one)
        return one

    def appended(self, messages: list[Outgoing], offsets: list[tuple[int, int]]) -> None:
        for message, (partition, offset) in zip(messages, offsets, strict=True):
            assert self.stored(partition, message).offset == offset

    def publish(self) -> None:
        messages = some_messages(self.dice)
        receipts = self.c.publish_many(TOPIC, messages)
        self.appended(messages, [(r.partition, r.offset) for r in receipts])

    def publish_one_by_one(self) -> None:
        for message in some_messages(self.dice)[:5]:
            receipt = self.c.publish_many(TOPIC, [message])[0]
            self.appended([message], [(receipt.partition, receipt.offset)])

    def publish_expecting(self) -> None:
        to = self.dice.randrange(PARTITIONS)
        messages = [Outgoing(m.payload, headers=m.headers, partition=to) for m in some_messages(self.dice)]
        receipts = self.c.publish_many(TOPIC, messages, expected_offset=len(self.log[to]))
        self.appended(messages, [(r.partition, r.offset) for r in receipts])

    def publish_again(self) -> None:
        """A repeat, with more behind it."""
        name = f"producer-{next(self.names)}"
        epoch = self.c.init_producer(name).epoch
        messages = some_messages(self.dice)
        of: Callable[[list[Outgoing]], Any] = lambda some: [  # noqa: E731
            (r.partition, r.offset, r.duplicate)
            for r in self.c.publish_many(TOPIC, some, producer_id=name, epoch=epoch, sequence=0)
        ]
        sent = of(messages)
        self.appended(messages, [one[:2] for one in sent])
        if len(messages) <= 1000:
            more = some_messages(self.dice)
            again = of(messages + more)
            assert again[: len(sent)] == [(p, o, True) for p, o, _ in sent]
            self.appended(more, [one[:2] for one in again[len(sent) :]])

    def publish_by_sql(self) -> None:
        messages = some_messages(self.dice)
        coded = [encode(m.payload) for m in messages]
        rows = self.db.execute(
            'SELECT partition, "offset" '
            "FROM custody.publish(%s, %s, %s, %s, %s, %s, p_allow_split => true, p_now => %s)",
            [
                TOPIC,
                [m.partition for m in messages],
                [m.key for m in messages],
                [kind.decode() for kind, _ in coded],
                [payload for _, payload in coded],
                [None if m.headers is None else json.dumps(m.headers) for m in messages],
                self.clock(),
            ],
        ).fetchall()
        self.appended(messages, rows)

    def publish_delayed(self) -> None:
        """All due at once, in the order in which they were given, before what is published then."""
        messages = [
            Outgoing(m.payload, key=m.key, headers=m.headers, partition=m.partition, allow_split=True, delay=5)
            for m in some_messages(self.dice)
        ][:900]
        self.c.publish_delayed(TOPIC, messages)
        self.clock.move(6)
        for partition in range(PARTITIONS):
            for message in messages:
                if message.partition == partition:
                    self.stored(partition, message)
            after = Outgoing("after", partition=partition)
            self.appended([after], [(partition, self.c.publish_many(TOPIC, [after])[0].offset)])

    def publish_with_a_transaction(self) -> None:
        messages = some_messages(self.dice)
        with self.c.init_producer(f"producer-{next(self.names)}").transaction() as transaction:
            for start in range(0, len(messages), 40):
                transaction.publish_many(TOPIC, messages[start : start + 40])
        for message in messages:
            assert message.partition is not None
            self.stored(message.partition, message)

    def publish_for_several(self) -> None:
        """As a server publishes for its callers, in one transaction."""
        calls = [some_messages(self.dice)[:300] for _ in range(self.dice.choice([2, 5]))]
        answers = ServerVerbs(self.c).publish_each([Publish(messages=[(TOPIC, m) for m in call]) for call in calls])
        for messages, receipts in zip(calls, answers, strict=True):
            assert isinstance(receipts, list)
            self.appended(messages, [(r.partition, r.offset) for r in receipts if isinstance(r, Receipt)])

    def publish_by_the_outbox(self) -> None:
        """Whoever publishes next takes the events along, before its own messages."""
        messages = [Outgoing(m.payload, key=m.key or "a", headers=m.headers) for m in some_messages(self.dice)][:900]
        with self.db.transaction():
            for m in messages:
                outbox.write(
                    self.db,
                    event_type="e",
                    payload=m.payload,
                    destination=TOPIC,
                    headers=m.headers,
                    partition_key=m.key,
                )
        for partition in range(PARTITIONS):
            for message in messages:
                if partition_for(str(message.key), PARTITIONS) == partition:
                    self.stored(partition, message)
            after = Outgoing("after", partition=partition)
            self.appended([after], [(partition, self.c.publish_many(TOPIC, [after])[0].offset)])

    def move(self) -> None:
        self.clock.move(self.dice.choice([0.001, 1, 60]))

    def seal(self) -> None:
        self.db.execute("SELECT custody.seal_segment(%s)", [TOPIC])


WRITERS = [
    RandomLog.publish,
    RandomLog.publish,
    RandomLog.publish_one_by_one,
    RandomLog.publish_expecting,
    RandomLog.publish_again,
    RandomLog.publish_by_sql,
    RandomLog.publish_delayed,
    RandomLog.publish_with_a_transaction,
    RandomLog.publish_for_several,
    RandomLog.publish_by_the_outbox,
    RandomLog.seal,
    RandomLog.move,
    RandomLog.move,
]
