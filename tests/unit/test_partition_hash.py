"""Key → partition is a documented hash: the same in Python, in SQL, and for ever."""

from __future__ import annotations

import random
import string
from collections import Counter

import psycopg
import pytest

from custody.model.placement import partition_for

# SHA-256 of the key in UTF-8, its first eight bytes big-endian without the sign bit, modulo the partitions
VECTORS = [
    ("", 4, 0),
    ("a", 4, 2),
    ("SKU-123", 4, 0),
    ("SKU-123", 7, 0),
    ("ünï 🦉", 16, 13),
    ("order-1", 4096, 2444),
]


@pytest.mark.req("K10")
@pytest.mark.parametrize(("key", "partitions", "expected"), VECTORS)
def test_the_hash_never_changes(key: str, partitions: int, expected: int) -> None:
    assert partition_for(key, partitions) == expected


@pytest.mark.core
@pytest.mark.req("K10")
def test_python_and_sql_agree(db: psycopg.Connection) -> None:
    chosen = random.Random(7)
    alphabet = string.printable + "äöüß€🦉漢字\u2028"
    keys = ["", *("".join(chosen.choices(alphabet, k=chosen.randrange(40))) for _ in range(2000))]
    counts = [chosen.choice([1, 2, 3, 4, 7, 16, 100, 4096]) for _ in keys]
    rows = db.execute(
        "SELECT custody.partition_for(k, n) FROM unnest(%s::text[], %s::int[]) WITH ORDINALITY m (k, n, i) ORDER BY i",
        [keys, counts],
    ).fetchall()
    assert [row[0] for row in rows] == [partition_for(key, count) for key, count in zip(keys, counts, strict=True)]


@pytest.mark.core
def test_no_key_has_no_partition_of_its_own(db: psycopg.Connection) -> None:
    assert db.execute("SELECT custody.partition_for(NULL, 4)").fetchone() == (None,)


def test_keys_spread_evenly() -> None:
    counts = Counter(partition_for(f"key-{n}", 8) for n in range(8000))
    assert set(counts) == set(range(8))
    assert max(counts.values()) < 1200
    assert min(counts.values()) > 800
