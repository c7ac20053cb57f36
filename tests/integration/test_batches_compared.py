"""A log of random batches and single messages beside a plain list: every way to read it says the same."""

from __future__ import annotations

import itertools
import json
import random
from bisect import bisect_left
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any
from uuid import UUID

import psycopg
import pytest
from tests.conftest import Clock
from tests.extent import size
from tests.integration.random_log import KEYS, PARTITIONS, TOPIC, WRITERS, RandomLog, Stored

from custody import Binding, Constant, Custody, Message, Policy
from custody.coalesced.claims import Claim
from custody.engine.server_verbs import ServerVerbs
from custody.errors import LeaseLost
from custody.model.codec import encode
from custody.model.outcomes import Outcome
from custody.model.slices import one_by_one
from custody.spark.database import arrow
from custody.spark.database.arrow import Read

pytestmark = pytest.mark.core


class Comparison(RandomLog):
    """What readers find, beside the list."""

    def same(self, found: list[Message], wanted: list[Stored]) -> None:
        assert [
            (m.partition, m.offset, m.published_at, m.key, *encode(m.payload), self.own(m.headers)) for m in found
        ] == [(w.partition, w.offset, w.published_at, w.key, w.kind.encode(), w.payload, w.headers) for w in wanted]

    @staticmethod
    def own(headers: dict[str, str] | None) -> dict[str, str]:
        return {name: value for name, value in (headers or {}).items() if not name.startswith("x-custody-")}

    def range(self, partition: int) -> tuple[int, int]:
        first, tail = self.first[partition], len(self.log[partition])
        start = self.dice.randint(first, tail)
        return start, min(tail, start + self.dice.choice([1, 2, 15, 16, 17, 100, 1000, 5000]))

    def reads(self) -> None:
        for partition, _ in itertools.product(range(PARTITIONS), range(4)):
            start, until = self.range(partition)
            if start == until:
                continue
            wanted = self.log[partition][start:until]
            self.same(self.c.read(TOPIC, partition, offset=start, max_messages=until - start), wanted)
            most = self.dice.choice([1, 100, 5000, 200_000])
            reached = list(itertools.accumulate(len(w.payload) for w in wanted))
            count = next((n for n, total in enumerate(reached, 1) if total >= most), len(wanted))
            rows = self.db.execute(
                'SELECT "offset" FROM custody.read(%s, %s, %s, %s, %s)', [TOPIC, partition, start, until - start, most]
            )
            assert [o for (o,) in rows] == [w.offset for w in wanted[:count]]

    def views(self) -> None:
        def rows(query: str, *values: Any) -> list[tuple[Any, ...]]:
            found = self.db.execute(query, values).fetchall()
            return [
                (p, o, t, k, {"json": "j", "text": "t", "bytes": "b"}[kind], b, self.own(h))
                for p, o, t, k, kind, b, h in found
            ]

        def plain(wanted: list[Stored]) -> list[tuple[Any, ...]]:
            return [(w.partition, w.offset, w.published_at, w.key, w.kind, w.payload, w.headers) for w in wanted]

        columns = 'partition, "offset", published_at, key, payload_kind, payload_bytes, headers'
        gone = {(d.partition, d.offset) for group in self.groups for d in self.c.dead(TOPIC, group)}
        gone = {(partition, offset) for partition, offset in gone if offset < self.first[partition]}
        kept = set(self.db.execute('SELECT partition, "offset" FROM custody.kept_events').fetchall())
        assert kept >= gone
        every = [
            one
            for log in self.log
            for one in log
            if one.offset >= self.first[one.partition] or (one.partition, one.offset) in kept
        ]
        assert rows(f"SELECT {columns} FROM custody.events WHERE topic = %s ORDER BY 1, 2", TOPIC) == plain(every)
        for partition in range(PARTITIONS):
            start, until = self.range(partition)
            between = f"SELECT {columns} FROM custody.events_between(%s, %s, %s, %s) ORDER BY 2"
            assert rows(between, TOPIC, partition, start, until) == plain(self.log[partition][start:until])
            one = f"SELECT {columns} FROM custody.event(%s, %s, %s)"
            assert rows(one, TOPIC, partition, start) == plain(self.log[partition][start : start + 1])

    def times(self) -> None:
        for partition in range(PARTITIONS):
            times = [one.published_at for one in self.log[partition]]
            if not times:
                continue
            at = self.dice.choice(times) + timedelta(microseconds=self.dice.choice([-1, 0, 0, 1]))
            found = self.db.execute("SELECT custody.offset_for_time(%s, %s, %s)", [TOPIC, partition, at]).fetchone()
            assert found == (max(self.first[partition], bisect_left(times, at)),)

    def arrow(self) -> None:
        partition = self.dice.randrange(PARTITIONS)
        start, until = self.range(partition)
        if start == until:
            return
        with arrow.Planner(self.url) as planner:
            rows = self.dice.choice([None, 7, 333])
            reads = [read for some in planner.reads(TOPIC, partition, start, until, rows=rows) for read in some]
        if self.dice.random() < 0.5:
            reads = [(source, self.gaps(ranges)) for source, ranges in reads]
            reads = [(source, ranges) for source, ranges in reads if ranges != "{}"]
        inside = {
            offset for _, ranges in reads for a, b in arrow._RANGE.findall(ranges) for offset in range(int(a), int(b))
        }
        wanted = [one for one in self.log[partition][start:until] if one.offset in inside]
        self.same_rows(reads, wanted)
        keys = self.dice.choices(KEYS, k=self.dice.choice([0, 1, 2, 30]))
        low = self.dice.randint(start, until)
        some = self.dice.sample(range(start, until), min(until - start, 5))
        filters: list[tuple[list[Any], Callable[[Stored], bool]]] = [
            ([("key", "=", KEYS[1])], lambda one: one.key == KEYS[1]),
            ([("key", "in", keys)], lambda one: one.key in keys),
            ([("key", "is null", None)], lambda one: one.key is None),
            ([("key", "is not null", None)], lambda one: one.key is not None),
            ([("offset", ">=", low)], lambda one: one.offset >= low),
            ([("offset", "in", some)], lambda one: one.offset in some),
            (
                [("key", "in", keys), ("key", "is not null", None), ("offset", "<", low)],
                lambda one: one.key in keys and one.offset < low,
            ),
        ]
        for conditions, holds in filters:
            self.same_rows(reads, [one for one in wanted if holds(one)], conditions=conditions)
        m = self.dice.choice([1, 2, 7])
        shares = [self.rows(reads, share=(k, m)) for k in range(m)]
        whole = self.rows(reads)
        assert sorted(itertools.chain(*shares), key=lambda row: row[1]) == whole
        for k, share in enumerate(shares):
            offsets = [o for b in arrow.offsets(self.url, reads, share=(k, m)) for o in b.column(0).to_pylist()]
            assert offsets == [row[1] for row in share]

    def gaps(self, ranges: str) -> str:
        """Some parts of a range."""
        ((a, b),) = arrow._RANGE.findall(ranges)
        cuts = sorted(
            self.dice.sample(range(int(a), int(b) + 1), min(int(b) - int(a) + 1, self.dice.choice([2, 4, 20])))
        )
        pairs = list(zip(cuts[::2], cuts[1::2], strict=False))
        joined = self.db.execute(
            "SELECT range_agg(int8range(a, b))::text FROM unnest(%s::int8[], %s::int8[]) x (a, b)",
            [[a for a, _ in pairs], [b for _, b in pairs]],
        ).fetchone()
        assert joined is not None
        return joined[0] or "{}"

    def rows(self, reads: list[Read], **wanted: Any) -> list[tuple[Any, ...]]:
        return [
            (
                row["partition"],
                row["offset"],
                row["published_at"],
                row["key"],
                row["kind"],
                row["payload"],
                self.own(json.loads(row["headers"] or "{}")),
            )
            for batch in arrow.events(self.url, reads, **wanted)
            for row in batch.to_pylist()
        ]

    def same_rows(self, reads: list[Read], wanted: list[Stored], **how: Any) -> None:
        assert self.rows(reads, **how) == [
            (w.partition, w.offset, w.published_at, w.key, w.kind, w.payload, w.headers) for w in wanted
        ]

    # lifecycle

    def claim_bytes(self) -> None:
        """A claim of a server ends with the message that reaches so many bytes, in slices and one by one."""
        group = f"g-{next(self.names)}"
        self.c.create_group(TOPIC, group, Policy(ordering=self.dice.choice(["none", "key"])))
        for n in range(6):
            most, slices = self.dice.choice([1, 100, 3000, 100_000]), self.dice.random() < 0.7
            lease, *rows = self.db.execute(
                "SELECT * FROM custody.claim(%s, %s, %s, p_bytes => %s, p_slices => %s, "
                "p_partition => %s, p_now => %s)",
                [TOPIC, group, self.dice.choice([2, 50, 2000]), most, slices, n % PARTITIONS, self.clock()],
            ).fetchall()
            found = sorted(one for row in rows for one in one_by_one(*row[1:2], *row[3:7], *row[10:]))
            wanted = [self.log[n % PARTITIONS][offset] for offset, *_ in found]
            assert [(o, k, kind, data, self.own(h)) for o, k, kind, data, h in found] == [
                (w.offset, w.key, w.kind, w.payload, w.headers) for w in wanted
            ]
            assert sum(len(w.payload) for w in wanted[:-1]) < most
            if wanted and self.dice.random() < 0.5:
                self.c.settle(UUID(lease[0]["lease_id"]), {w.offset: Outcome("ack") for w in wanted})
        self.c.delete_group(TOPIC, group)

    def claim_bound(self) -> None:
        """A group that is bound to some messages gets these, however they lie in batches."""
        group = f"g-{next(self.names)}"
        self.c.create_group(TOPIC, group, bindings=[Binding(headers={"n": "1"}), Binding(headers={"quoted": '{"\\",'})])
        wanted = [
            one
            for p in range(PARTITIONS)
            for one in self.log[p][self.first[p] :]
            if one.headers.get("n") == "1" or "quoted" in one.headers
        ]
        found: list[Message] = []
        while True:
            lease = self.c.claim(TOPIC, group, max_messages=self.dice.choice([3, 50, 2000]))
            if lease:
                found += lease
                lease.ack()
            elif lease.reason != "busy":
                break
        self.same(sorted(found, key=lambda m: (m.partition, m.offset)), wanted)
        self.c.delete_group(TOPIC, group)

    def claim_for_several(self) -> None:
        group = f"g-{next(self.names)}"
        self.c.create_group(TOPIC, group, Policy(ordering=self.dice.choice(["none", "key"])))
        callers = [Claim(max_messages=self.dice.choice([1, 20, 300]), worker=f"w{n}") for n in range(4)]
        seen: set[int] = set()
        for lease in ServerVerbs(self.c).claim_each(TOPIC, group, 0, callers):
            self.same(list(lease), [self.log[0][m.offset] for m in lease])
            assert not seen & {m.offset for m in lease}
            seen |= {m.offset for m in lease}
        self.c.delete_group(TOPIC, group)

    def consume(self) -> None:
        """A group, perhaps a late one, takes everything, with failures. Each message comes as it is stored."""
        group = f"g-{next(self.names)}"
        ordered = self.dice.random() < 0.6
        policy = Policy(
            ordering="key" if ordered else "none",
            max_attempts=2,
            backoff=Constant("1s"),
            dead_letter=self.dice.choice(["keep", "topic"]),
            fairness="key" if ordered and self.dice.random() < 0.3 else None,
        )
        times = sorted(one.published_at for log in self.log for one in log)
        since = self.dice.choice(times) if times and self.dice.random() < 0.3 else None
        self.c.create_group(TOPIC, group, policy, start=since or "earliest")
        left = {
            (one.partition, one.offset)
            for p in range(PARTITIONS)
            for one in self.log[p][self.first[p] :]
            if since is None or one.published_at >= since
        }
        acked: dict[tuple[int, str], int] = {}
        """The last message of each key."""
        while True:
            most = self.dice.choice([1, 5, 40, 700, 3000]) if len(left) < 300 else self.dice.choice([40, 700, 3000])
            lease = self.c.claim(TOPIC, group, max_messages=most)
            if not lease:
                if self.c.stats(TOPIC, group).depth == 0:
                    break
                self.clock.move(2)
                continue
            self.same(list(lease), [self.log[lease.messages[0].partition][m.offset] for m in lease])
            left -= {(m.partition, m.offset) for m in lease}
            bad = self.dice.choice([len(lease), len(lease), self.dice.randrange(len(lease))])
            for m in lease.messages[:bad] if ordered else ():
                if m.key is not None:
                    assert acked.get((m.partition, m.key), -1) < m.offset
                    acked[m.partition, m.key] = m.offset
            lease.ack(lease.messages[:bad])
            if bad == len(lease):
                continue
            lease.nack(lease.messages[bad], error="no", requeue=self.dice.random() < 0.5)
            with suppress(LeaseLost):
                lease.release()
        assert left == set()
        dead = self.c.dead(TOPIC, group)
        self.same([*dead], [self.log[d.partition][d.offset] for d in dead])
        self.groups.append(group)

    def retain(self) -> None:
        """Sealed segments are dropped, but for what the newest group has left: dead messages stay."""
        for group in self.groups[:-1]:
            self.forget(group)
        self.seal()
        self.db.execute("SELECT * FROM custody.drop_segments(%s)", [TOPIC])
        self.first = list(self.c.topic(TOPIC).first_offsets)
        for group in self.groups:
            dead = self.c.dead(TOPIC, group)
            self.same([*dead], [self.log[d.partition][d.offset] for d in dead])

    def forget(self, group: str) -> None:
        self.c.delete_group(TOPIC, group)
        self.groups.remove(group)

    def redrive(self) -> None:
        """Dead messages come again, also those whose segment is gone."""
        for group in self.groups[-1:]:
            wanted = {(d.partition, d.offset) for d in self.c.dead(TOPIC, group)}
            self.c.redrive(TOPIC, group)
            while lease := self.c.claim(TOPIC, group, max_messages=3000):
                came = [m for m in lease if (m.partition, m.offset) in wanted]
                self.same(list(lease), [self.log[m.partition][m.offset] for m in lease])
                wanted -= {(m.partition, m.offset) for m in came}
                lease.ack()
            assert wanted == set()
            self.forget(group)


READERS = [
    Comparison.reads,
    Comparison.views,
    Comparison.times,
    Comparison.arrow,
    Comparison.claim_bytes,
    Comparison.claim_bound,
    Comparison.claim_for_several,
]


@pytest.mark.parametrize("seed", range(size(2, 6)))
@pytest.mark.parametrize("rounds", [size(14, 40), pytest.param(400, marks=pytest.mark.long)], ids=["some", "many"])
def test_whatever_reads_it_reads_the_same(
    c: Custody, db: psycopg.Connection[Any], database_url: str, clock: Clock, seed: int, rounds: int
) -> None:
    c.create_topic(TOPIC, partitions=PARTITIONS)
    one = Comparison(c, db, database_url, clock, random.Random(seed))
    for n in range(rounds):
        one.dice.choice(WRITERS)(one)
        one.dice.choice(READERS)(one)
        if n % 7 == 6:
            one.consume()
            one.dice.choice([one.retain, one.redrive, one.views])()
    for read in READERS:
        read(one)
