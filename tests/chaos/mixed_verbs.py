"""Does every verb at random on shared topics until it is killed, or ended by SIGTERM.

Arguments: database URL, name. What it gets a receipt for goes to the table `sent`, and each message that it settles as
done goes to the table `done` in the transaction of the ack: both are written by this process, not by Custody.

Errors that are part of such a life are passed over; any other one ends the process with a traceback.
"""

from __future__ import annotations

import contextlib
import random
import signal
import sys
import threading
import uuid
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import psycopg

import custody
from custody.errors import (
    DelayNotFound,
    LeaseLost,
    NotSkippable,
    OffsetOutOfRange,
    OrderConflict,
    ProducerFenced,
    TransactionOver,
    Transient,
)

TOPICS = ("orders", "returns")
KEYS = [None, *(f"key {n}" for n in range(12))]
EXPECTED = (LeaseLost, NotSkippable, OffsetOutOfRange, OrderConflict, ProducerFenced, TransactionOver, Transient)


class Life:
    def __init__(self, url: str, name: str) -> None:
        self.dice = random.Random(name)
        self.name = name
        self.url = url
        self.c = custody.connect(url, worker=name, pool_size=3)
        self.own = psycopg.connect(url, autocommit=True)
        self.producer = self.c.init_producer(f"producer {name}")

    # publishing

    def message(self, **rest: Any) -> custody.Outgoing:
        return custody.Outgoing(
            {"id": uuid.uuid4().hex, "of": self.name},
            key=self.dice.choice(KEYS),
            routing_key=self.dice.choice(["eu.new", "us.new", None]),
            **rest,
        )

    def sent(self, topic: str, messages: Sequence[custody.Outgoing], receipts: Iterable[Any]) -> None:
        """Written after the receipt: a kill in between leaves a message that nobody promised anything about."""
        rows = [
            (message.payload["id"], topic, receipt.partition, receipt.offset)
            for message, receipt in zip(messages, receipts, strict=True)
        ]
        with self.own.cursor() as cursor:
            cursor.executemany('INSERT INTO sent (id, topic, partition, "offset") VALUES (%s, %s, %s, %s)', rows)

    def publish(self) -> None:
        topic = self.dice.choice(TOPICS)
        messages = [self.message() for _ in range(self.dice.choice([1, 1, 3, 20, 100]))]
        verb = self.dice.choice([self.c.publish_many, self.producer.publish_many])
        self.sent(topic, messages, verb(topic, messages))

    def publish_later(self) -> None:
        topic = self.dice.choice(TOPICS)
        messages = [self.message(delay=timedelta(milliseconds=self.dice.randrange(1, 800))) for _ in range(3)]
        delayed = self.c.publish_delayed(topic, messages)
        with self.own.cursor() as cursor:
            cursor.executemany(
                "INSERT INTO sent (id, topic) VALUES (%s, %s)", [(message.payload["id"], topic) for message in messages]
            )
        if self.dice.random() < 0.2:
            # first the promise is taken back: a kill in between leaves a message that may or may not be there
            self.own.execute("DELETE FROM sent WHERE id = %s", [messages[0].payload["id"]])
            with contextlib.suppress(DelayNotFound):
                self.c.cancel_delayed(topic, delayed[0].delay_id)

    def write_event(self) -> None:
        """An event of the outbox and the note that it was sent share one transaction."""
        topic, message = self.dice.choice(TOPICS), self.message()
        with self.own.transaction():
            custody.outbox.write(
                self.own,
                event_type="made",
                payload=message.payload,
                destination=topic,
                ordering_key=message.key,
                partition_key=message.key,
            )
            self.own.execute("INSERT INTO sent (id, topic) VALUES (%s, %s)", [message.payload["id"], topic])

    # consuming

    def claimed(self, groups: Sequence[str] = ("ordered", "loose", "bound")) -> tuple[str, str, custody.Lease]:
        topic, group = self.dice.choice(TOPICS), self.dice.choice(groups)
        lease = self.c.claim(
            topic,
            group,
            max_messages=self.dice.choice([1, 2, 10, 60]),
            visibility_timeout=timedelta(milliseconds=self.dice.choice([300, 1000, 3000])),
        )
        return topic, group, lease

    def done(self, group: str, messages: Iterable[custody.Message]) -> None:
        rows = [(m.topic, group, m.partition, m.offset) for m in messages]
        with self.own.cursor() as cursor:
            cursor.executemany(
                'INSERT INTO done (topic, "group", partition, "offset") VALUES (%s, %s, %s, %s)', sorted(rows)
            )

    def ack_whole(self) -> None:
        """A whole lease with its effects in one transaction: all of them, or none."""
        _, group, lease = self.claimed()
        if lease:
            self.dawdle()
            with self.own.transaction():
                self.done(group, lease)
                lease.ack(connection=self.own)

    def ack_in_pieces(self) -> None:
        _, group, lease = self.claimed()
        messages = list(lease.messages)
        while messages:
            piece, messages = messages[:7], messages[7:]
            with self.own.transaction():
                self.done(group, piece)
                lease.ack(piece, connection=self.own)
            if self.dice.random() < 0.2:
                break  # the rest expires

    def ack_by_transaction(self) -> None:
        """A message out for each message in, together with the ack."""
        topic, group, lease = self.claimed()
        if not lease:
            return
        self.dawdle()
        with self.producer.transaction(timeout="5s") as tx:
            tx.publish_many("results", [[topic, group, m.partition, m.offset] for m in lease])
            tx.ack(lease)

    def settle_each(self) -> None:
        """Outcomes by chance; what is done is said with its effect, after what is not."""
        _, group, lease = self.claimed()
        failed: set[str | None] = set()
        good, outcomes = [], {}
        for message in lease:
            if message.key is not None and message.key in failed:
                continue
            if self.dice.random() < 0.7:
                good.append(message)
                continue
            kind = self.dice.choice(["nack", "nack", "later", "release", "reject"])
            delay = 0.05 if kind == "later" else None
            outcomes[message.offset] = custody.Outcome(kind, error="by chance", delay=delay)
            failed.add(message.key)
        if good:
            with self.own.transaction():
                self.done(group, good)
                lease.ack(good, connection=self.own)
        if outcomes:
            self.c.settle(lease.lease_id, outcomes)

    def give_back(self) -> None:
        _, _, lease = self.claimed()
        if lease:
            if self.dice.random() < 0.5:
                lease.extend("1s")
            self.dice.choice([lease.release, lease.nack, lambda: lease.later(after="50ms")])()

    def abandon(self) -> None:
        self.claimed()

    def dawdle(self) -> None:
        """Long enough, at times, for the lease to run out."""
        if self.dice.random() < 0.1:
            threading.Event().wait(self.dice.choice([0.05, 0.35]))

    # operating

    def operate(self) -> None:
        topic, group = self.dice.choice(TOPICS), self.dice.choice(["ordered", "loose", "bound"])
        c = self.c
        letters = c.dead(topic, group, limit=20)
        verbs: list[Callable[[], object]] = [
            lambda: c.redrive(topic, group, limit=10),
            lambda: c.discard(topic, group, limit=2),
            lambda: self.rewind(topic, group),
            lambda: self.rewind(topic, group),
            lambda: self.rewind(topic, group),
            lambda: c.release_key(topic, group, "key 1"),
            lambda: c.bind(topic, "bound", self.dice.choice([["eu.*"], ["eu.*", "us.*"]])),
            lambda: (c.pause(topic, group), c.resume(topic, group)),
            lambda: c.update_group(topic, group, c.group(topic, group).policy or custody.Policy()),
            lambda: c.maintain(topic),
            lambda: (c.stats(topic, group), c.blocked_keys(topic, group), c.in_flight(topic), c.overview()),
            *(lambda letter=letter: c.skip(topic, group, letter.partition, letter.offset) for letter in letters[:1]),
            *(lambda letter=letter: c.trace(topic, letter.partition, letter.offset) for letter in letters[:1]),
            *([self.replay] if letters else []),
        ]
        self.dice.choice(verbs)()

    def rewind(self, topic: str, group: str) -> None:
        """To a place in the middle of what is in flight, if anything is."""
        leased = self.own.execute(
            "SELECT partition, max(upper(offsets)) - 1 FROM custody.in_flight WHERE topic = %s AND consumer_group = %s"
            " GROUP BY partition",
            [topic, group],
        ).fetchall()
        for partition, offset in leased[:1]:
            self.c.rewind(topic, group, partition=partition, to_offset=max(offset - self.dice.randrange(20), 0))

    def replay(self) -> None:
        """A replayed copy is one more message of the topic, with the id of the first."""
        copies = self.c.read("orders-dlq", 0, max_messages=1000)
        if copies:
            copy = self.dice.choice(copies)
            self.c.replay("orders-dlq", 0, copy.offset)

    def step(self) -> None:
        verbs = {
            self.publish: 5,
            self.publish_later: 1,
            self.write_event: 2,
            self.ack_whole: 6,
            self.ack_in_pieces: 3,
            self.ack_by_transaction: 3,
            self.settle_each: 5,
            self.give_back: 1,
            self.abandon: 1,
            self.operate: 4,
        }
        (verb,) = self.dice.choices(list(verbs), list(verbs.values()))
        try:
            verb()
        except EXPECTED as error:
            if isinstance(error, ProducerFenced):
                self.producer = self.c.init_producer(f"producer {self.name}")
        except psycopg.OperationalError:
            self.own.close()
            self.own = psycopg.connect(self.url, autocommit=True)


if __name__ == "__main__":
    life = Life(*sys.argv[1:])
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    print("started")
    steps = 0
    while not ended.is_set():
        life.step()
        steps += 1
    print(steps)
