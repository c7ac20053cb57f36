"""The verdict on a pipeline from topic to topic: what it published against what the journal says was done.

Messages carry the number that they have in their key, and each output where its message came from, so that the output
topic alone shows what is missing, double, or out of order.
"""

from __future__ import annotations

import json
import re
import zlib
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pyarrow.dataset as ds
from tests.order_rule import audit

import custody
from custody.model.lifecycle import MessageState

SOURCE, GROUP, SINK = "in", "g", "out"
SET = 2
"""Outputs of each message: a set that is published whole or not at all."""
ROW = "partition int, offset bigint, seq int, part int"
"""An output as a row."""
NAMES = ("partition", "offset", "seq", "part")

Place = tuple[int, int]
"""Partition and offset."""


def policy(**rules: Any) -> custody.Policy:
    """Order by key, quick retries, and leases that a test can wait for."""
    defaults = {"max_attempts": 20, "backoff": custody.Constant("50ms"), "visibility_timeout": "3s"}
    return custody.Policy(ordering="key", **{**defaults, **rules})


def prepare(c: custody.Custody, rules: custody.Policy | None = None, *, group: str = GROUP, sink: str = SINK) -> None:
    """The topics and the group; of different numbers of partitions, so that none of them matches by luck."""
    if SOURCE not in {topic.name for topic in c.topics()}:
        c.create_topic(SOURCE, partitions=2)
    c.create_topic(sink, partitions=3)
    c.create_group(SOURCE, group, rules or policy())


def publish(c: custody.Custody, first: int, count: int, keys: int = 200) -> None:
    """Messages first, first + 1, …: in turn for each key, numbered in their key."""
    messages = range(first, first + count)
    c.publish_many(SOURCE, [custody.Outgoing({"seq": n // keys}, key=f"key {n % keys}") for n in messages])


def chance(*of: object) -> int:
    """0 to 999, always the same for the same things. As `crc32` of Spark SQL."""
    return zlib.crc32("/".join(map(str, of)).encode()) % 1000


def passed_on(message: custody.Message) -> list[dict[str, Any]]:
    """The outputs of a message. Runs in executors."""
    named = {"partition": message.partition, "offset": message.offset, "seq": message.payload["seq"]}
    return [{**named, "part": part} for part in range(SET)]


def summed(message: custody.Message, state: Any) -> list[dict[str, Any]]:
    """The same outputs; the state is the sum of the key's messages. Runs in executors."""
    state.update((state.get() or 0) + message.payload["seq"])
    return passed_on(message)


def assert_states_are_sums(c: custody.Custody) -> int:
    """The state of each key is the sum of its done messages, which are added up here from the log. Returns how many."""
    done, sums = verdict(c).done, Counter[str]()
    with psycopg.connect(c.database_url, autocommit=True) as db:
        query = 'SELECT partition, "offset", key, payload::jsonb FROM custody.events WHERE topic = %s'
        for partition, offset, key, payload in db.execute(query, [SOURCE]):
            if (partition, offset) in done:
                sums[key] += payload["seq"]
    stored = {one.key: one.state for one in c.key_states(SOURCE, GROUP, limit=100_000)}
    assert stored == dict(sums)
    return len(done)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What was found. Whatever must not be is an AssertionError by then."""

    published: int
    done: frozenset[Place]
    dead: dict[Place, str | None]
    open: int
    outputs: int
    batches: int
    lost: int
    stages: int
    """Stages that are still there: of claims that were lost or killed before somebody could clear them away."""


def verdict(c: custody.Custody, *, group: str = GROUP, sink: str = SINK) -> Verdict:
    """Checks everything that a pipeline promises of its group and its sink."""
    with psycopg.connect(c.database_url, autocommit=True) as db:
        keys = {
            (partition, offset): key
            for partition, offset, key in db.execute(
                'SELECT partition, "offset", key FROM custody.events WHERE topic = %s', [SOURCE]
            )
        }
        done, dead, unresolved = _states(db, keys, group)
        _agree_with_views(c, db, group, len(keys), done, dead, unresolved)
        outputs = _outputs(db, keys, group, sink)
        batches, settled, lost, counted = db.execute(
            "SELECT count(*), coalesce(sum(done), 0), coalesce(sum(lost), 0), coalesce(sum(outputs), 0)"
            " FROM custody.pipeline_batches JOIN custody.groups g USING (group_id) WHERE g.name = %s",
            [group],
        ).fetchone() or (0, 0, 0, 0)
        assert (settled, counted) == (outputs // SET, outputs), "the batches' own figures"
        return Verdict(
            published=len(keys),
            done=frozenset(done),
            dead=dict.fromkeys(dead) | _errors(db, group),
            open=len(unresolved),
            outputs=outputs,
            batches=batches,
            lost=int(lost),
            stages=_stages(db),
        )


def _states(
    db: psycopg.Connection[Any], keys: dict[Place, str], group: str
) -> tuple[set[Place], set[Place], set[Place]]:
    """Done, dead and open messages: the journal folded, which refuses illegal moves and a broken order."""
    of: dict[MessageState, set[Place]] = defaultdict(set)
    for partition in {partition for partition, _ in keys}:
        journal = audit(db, SOURCE, group, partition)
        assert journal.violations == []
        for offset, state in journal.states.items():
            of[state].add((partition, offset))
    done, dead = of[MessageState.DONE], of[MessageState.DEAD]
    assert done | dead <= set(keys)
    return done, dead, set(keys) - done - dead


def _agree_with_views(
    c: custody.Custody,
    db: psycopg.Connection[Any],
    group: str,
    published: int,
    done: set[Place],
    dead: set[Place],
    unresolved: set[Place],
) -> None:
    """The journal, the view of deliveries and the figures tell the same."""
    rows = db.execute(
        "SELECT status, partition, event_offset FROM custody.deliveries WHERE topic = %s AND consumer_group = %s",
        [SOURCE, group],
    ).fetchall()
    shown: dict[str, set[Place]] = defaultdict(set)
    for status, partition, offset in rows:
        assert (partition, offset) not in shown[status], "a delivery is shown once"
        shown[status].add((partition, offset))
    stats = c.stats(SOURCE, group)
    assert sum(stats.tail) == published
    assert shown["dead"] == dead
    assert stats.dead == len(dead)
    assert shown["ready"] | shown["processing"] <= unresolved
    assert len(shown["ready"]) + len(shown["processing"]) + stats.lag == len(unresolved)
    assert stats.depth == len(unresolved), "a dead message is not held here"
    assert published == len(done) + len(dead) + len(unresolved)


def _outputs(db: psycopg.Connection[Any], keys: dict[Place, str], group: str, sink: str) -> int:
    """One set of outputs for each time that a message was done; those of a key in the order in which they were."""
    acks = db.execute(
        "SELECT partition, offsets FROM custody.history WHERE topic = %s AND consumer_group = %s AND kind = 'ack'"
        " ORDER BY entry",
        [SOURCE, group],
    ).fetchall()
    expected: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
    for partition, ranges in acks:
        for stretch in ranges:
            for offset in range(stretch.lower, stretch.upper):
                expected[keys[partition, offset]] += [(partition, offset, part) for part in range(SET)]
    found: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
    numbers: dict[str, list[int]] = defaultdict(list)
    places: dict[str, set[int]] = defaultdict(set)
    rows = db.execute(
        'SELECT partition, key, payload::jsonb FROM custody.events WHERE topic = %s ORDER BY partition, "offset"',
        [sink],
    ).fetchall()
    for place, key, payload in rows:
        found[key].append((payload["partition"], payload["offset"], payload["part"]))
        numbers[key].append(payload["seq"])
        places[key].add(place)
    have, due = (Counter(one for of_key in each.values() for one in of_key) for each in (found, expected))
    assert have - due == Counter(), f"published without a done message, or twice: {list((have - due).items())[:5]}"
    assert due - have == Counter(), f"done, but not published: {list((due - have).items())[:5]}"
    assert all(len(partitions) == 1 for partitions in places.values()), "a key stays in its partition"
    for key, outputs in found.items():
        assert outputs == expected[key], f"{key} is out of order"
        if len(set(outputs)) == len(outputs):  # no message was done twice: nobody has rewound
            assert numbers[key] == sorted(numbers[key]), f"{key} goes back: {numbers[key]}"
    tails = db.execute(
        'SELECT count(*) = max("offset") + 1 FROM custody.events WHERE topic = %s GROUP BY partition', [sink]
    ).fetchall()
    assert all(dense for (dense,) in tails), "offsets are dense"
    return len(rows)


def _errors(db: psycopg.Connection[Any], group: str) -> dict[Place, str | None]:
    rows = db.execute(
        'SELECT partition, "offset", last_error FROM custody.dead_letters WHERE topic = %s AND consumer_group = %s',
        [SOURCE, group],
    )
    return {(partition, offset): error for partition, offset, error in rows}


def _stages(db: psycopg.Connection[Any]) -> int:
    """How many staging tables are there. Each is registered, and each that is registered is there. What tasks have
    written into the log and nobody has published is of one of them."""
    registered = {name for (name,) in db.execute("SELECT name FROM custody.stages")}
    hidden = db.execute('SELECT DISTINCT "offset" >> 24 FROM custody.log WHERE partition < 0').fetchall()
    assert set(hidden) <= set(db.execute("SELECT stage_id FROM custody.stages").fetchall())
    tables = {name for (name,) in db.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'custody'")}
    assert {name for name in tables if re.match(r"staged_", name)} == registered
    return len(registered)


def in_files(table: Path) -> Counter[str]:
    """The rows of the table, as anybody reads it."""
    rows = ds.dataset(table, format="parquet").to_table(columns=list(NAMES)).to_pylist()
    return Counter(json.dumps(row) for row in rows)


def in_topic(db: psycopg.Connection[Any]) -> Counter[str]:
    """The same messages, as they were published in the transaction that made them done."""
    rows = db.execute("SELECT payload::jsonb FROM custody.events WHERE topic = %s", [SINK]).fetchall()
    return Counter(json.dumps({name: payload[name] for name in NAMES}) for (payload,) in rows)
