"""What would make a batch that nobody can cut again is refused, and what may not share a row gets its own."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from tests.integration.test_batches import content, expected, rows, some

from custody import Custody, Outgoing
from custody.spark.database import arrow

pytestmark = pytest.mark.core

TOPIC = "orders"
N = 20


@pytest.fixture(autouse=True)
def topic(c: Custody) -> None:
    c.create_topic(TOPIC, partitions=2)


def append(db: psycopg.Connection[Any], **changed: Any) -> None:
    """As a client appends: 20 messages of one byte to one partition, or what is changed of that."""
    given: dict[str, Any] = {
        "partitions": [0],
        "counts": [N],
        "keys": [],
        "kinds": ["j"],
        "payloads": [],
        "headers": [],
        "joined": b"1" * N,
        "ends": list(range(1, N + 1)),
    } | changed
    db.execute(
        "SELECT custody.append(%(topic)s, %(partitions)s::int[], %(counts)s::int[], %(keys)s::text[], "
        '%(kinds)s::"char"[], %(payloads)s::bytea[], %(headers)s::text[], p_joined => %(joined)s, '
        "p_ends => %(ends)s::int[], p_of => 2, p_priorities => false)",
        {"topic": TOPIC} | given,
    )


@pytest.mark.parametrize(
    "changed",
    [
        {"ends": [*range(1, N), N + 1]},
        {"ends": [*range(1, N), None]},
        {"ends": [5, *range(2, N + 1)]},
        {"ends": [-1, *range(2, N + 1)]},
        {"ends": [1, None, *range(3, N + 1)]},
        {"keys": ["a"]},
        {"keys": ["a"] * (N + 1)},
        {"headers": ["{}"]},
        {"kinds": ["j", "t"]},
        {"kinds": ["j"] * (N + 1)},
        {"partitions": [0, 1], "counts": [10, 9]},
        {"partitions": [0, 1], "counts": [10, 11]},
        {"partitions": [0, 1], "counts": [-1, N + 1]},
    ],
    ids=str,
)
def test_a_client_that_counts_wrong(db: psycopg.Connection[Any], changed: dict[str, Any]) -> None:
    with pytest.raises(psycopg.Error) as refused:
        append(db, **changed)
    assert refused.value.diag.message_detail == "invalid_argument"
    assert rows(db) == []


def test_payloads_that_are_null(db: psycopg.Connection[Any]) -> None:
    with pytest.raises(psycopg.errors.CheckViolation):
        append(db, payloads=[b"1"] * (N - 1) + [None], kinds=["j"] * N, joined=None, ends=None)
    assert rows(db) == []


@pytest.mark.parametrize("which", ["keys", "kinds", "headers"])
@pytest.mark.parametrize("count", [N - 1, N + 1])
@pytest.mark.parametrize("partitions", [1, 2])
def test_arrays_of_other_lengths_in_sql(db: psycopg.Connection[Any], which: str, count: int, partitions: int) -> None:
    given: dict[str, list[Any]] = {"keys": [None] * N, "kinds": ["t"] * N, "headers": [None] * N}
    given[which] = (given[which] * 2)[:count]
    with pytest.raises(psycopg.Error, match="not as many keys"):
        db.execute(
            "SELECT custody.publish(%s, %s, %s, %s, %s, %s)",
            [TOPIC, [n % partitions for n in range(N)], given["keys"], given["kinds"], [b"x"] * N, given["headers"]],
        )
    assert rows(db) == []


def test_messages_with_large_headers_are_rows(c: Custody, db: psycopg.Connection[Any]) -> None:
    """Headers of a batch are one value of jsonb for its readers, which has a limit."""
    sent = [Outgoing(n, headers={"h": "x" * 2000}, partition=0) for n in range(N)]
    c.publish_many(TOPIC, sent)
    assert rows(db) == [1] * N
    assert content(c.read(TOPIC)) == expected(sent)


def test_a_key_that_is_wanted_twice_is_read_once(c: Custody, database_url: str) -> None:
    c.publish_many(TOPIC, [Outgoing(n, key=f"k{n % 3}", partition=0, allow_split=True) for n in range(N)])
    with arrow.Planner(database_url) as planner:
        (reads,) = planner.reads(TOPIC, 0, 0, N)
    found = arrow.events(database_url, reads, conditions=[("key", "in", ["k1", "k1"])])
    assert [offset for batch in found for offset in batch.column("offset").to_pylist()] == list(range(1, N, 3))


@pytest.mark.parametrize("payload", ["", b"", "é"])
def test_messages_that_are_all_alike(c: Custody, database_url: str, payload: str | bytes) -> None:
    c.publish_many(TOPIC, [Outgoing(payload, partition=0)] * N)
    assert [m.payload for m in c.read(TOPIC)] == [payload] * N
    with arrow.Planner(database_url) as planner:
        (reads,) = planner.reads(TOPIC, 0, 0, N)
    data = payload.encode() if isinstance(payload, str) else payload
    for share in (None, (0, 1)):
        found = [row for batch in arrow.events(database_url, reads, share=share) for row in batch.to_pylist()]
        assert [row["payload"] for row in found] == [data] * N


def test_a_long_publish_ends_with_a_few(c: Custody) -> None:
    c.publish_many(TOPIC, sent := [Outgoing(one.payload, partition=0) for one in some(10_003)])
    assert [m.payload for m in c.read(TOPIC, max_messages=20_000)] == [one.payload for one in sent]
