"""Two relays, or a relay and an operator, in transactions that overlap."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

import custody

pytestmark = [pytest.mark.core, pytest.mark.req("O4", "O10")]

NOW = "2030-01-02"


@pytest.fixture
def sessions(database_url: str) -> Iterator[tuple[psycopg.Connection[Any], psycopg.Connection[Any]]]:
    """Two sessions that give up waiting for a lock soon: nothing here may wait."""
    with (
        psycopg.connect(database_url, options="-c lock_timeout=3s") as first,
        psycopg.connect(database_url, options="-c lock_timeout=3s") as second,
    ):
        yield first, second
        first.rollback()
        second.rollback()


@pytest.fixture
def events(db: psycopg.Connection[Any]) -> None:
    """Three of one key, one of another, one of none."""
    with db.transaction():
        for n, key in enumerate(["a", "a", "a", "b", None]):
            custody.outbox.write(db, event_type="e", payload=n, destination="test:", ordering_key=key)


def claim(session: psycopg.Connection[Any], most: int, after: int = 0, now: str = NOW) -> list[int]:
    rows = session.execute(
        "SELECT * FROM custody.outbox_claim('r', %s, '30 s', 5, p_after => %s, p_now => %s)", [most, after, now]
    ).fetchall()[1:]
    return sorted(int(row[5]) for row in rows)


def settle(session: psycopg.Connection[Any], payload: int, outcome: str, now: str = NOW) -> int:
    return len(
        session.execute(
            "SELECT custody.outbox_settle(claimed_by, ARRAY[id], ARRAY[%s], ARRAY[NULL]::text[], ARRAY[60]::float8[], "
            "5, p_now => %s) FROM custody.outbox WHERE payload = %s::text::bytea",
            [outcome, now, payload],
        ).fetchall()
    )


Sessions = tuple[psycopg.Connection[Any], psycopg.Connection[Any]]


def test_nobody_overtakes_a_claim_that_is_not_committed(sessions: Sessions, events: None) -> None:
    first, second = sessions
    assert claim(first, 1) == [0]
    assert claim(second, 10) == [3, 4], "the key's second event was claimed before its first"
    first.commit()
    second.commit()
    assert claim(second, 10) == []


def test_a_claim_that_is_rolled_back_leaves_its_key_free(sessions: Sessions, events: None) -> None:
    first, second = sessions
    assert claim(first, 10) == [0, 1, 2, 3, 4]
    assert claim(second, 10) == []
    second.commit()
    first.rollback()
    assert claim(second, 10) == [0, 1, 2, 3, 4]


def test_a_settle_that_is_not_committed_still_holds_its_key(sessions: Sessions, events: None) -> None:
    first, second = sessions
    assert claim(first, 1) == [0]
    first.commit()
    assert settle(first, 0, "published") == 1
    assert claim(second, 10) == [3, 4]
    second.commit()
    first.commit()
    assert claim(second, 10) == [1, 2]


def test_what_expires_under_two_claims_at_once_is_taken_by_one(sessions: Sessions, events: None) -> None:
    first, second = sessions
    assert claim(first, 10) == [0, 1, 2, 3, 4]
    first.commit()
    later = "2030-01-03"
    assert claim(first, 10, now=later) == [0]
    assert claim(second, 10, now=later) == []
    first.commit()
    second.commit()
    attempts = first.execute("SELECT DISTINCT attempts FROM custody.outbox").fetchall()
    assert attempts == [(1,)], "an expiry was counted twice"


def test_an_operator_who_is_at_an_event_holds_back_its_key_only(sessions: Sessions, events: None) -> None:
    operator, relay = sessions
    operator.execute("SELECT custody.outbox_kill(ARRAY(SELECT event_id FROM custody.outbox ORDER BY id LIMIT 1), 'me')")
    assert claim(relay, 10) == [3, 4]
    relay.commit()
    operator.commit()
    assert claim(relay, 10) == [1, 2]


def test_an_operator_ends_what_a_relay_has_claimed_and_the_relay_settles_nothing(
    sessions: Sessions, events: None
) -> None:
    operator, relay = sessions
    (first, *_) = relay.execute(
        "SELECT id, claimed_by FROM custody.outbox_claim('r', 1, '30 s', 5, p_now => %s) WHERE id IS NOT NULL", [NOW]
    ).fetchall()
    relay.commit()
    operator.execute("SELECT custody.outbox_kill(ARRAY(SELECT event_id FROM custody.outbox WHERE id = %s))", [first[0]])
    operator.commit()
    settled = relay.execute(
        "SELECT * FROM custody.outbox_settle(%s, ARRAY[%s]::bigint[], '{published}', '{NULL}', '{NULL}', 5, "
        "p_now => %s)",
        [first[1], first[0], NOW],
    ).fetchall()
    assert settled == []
    assert relay.execute("SELECT status FROM custody.outbox WHERE id = %s", [first[0]]).fetchone() == ("DEAD",)


def test_claims_that_begin_behind_an_open_event_do_not_take_what_follows_it(sessions: Sessions, events: None) -> None:
    """A relay goes on where it was: what lies before it is not in its window, and counts all the same."""
    first, _ = sessions
    row = first.execute("SELECT min(id) FROM custody.outbox").fetchone()
    assert row is not None
    assert claim(first, 10, after=row[0]) == [3, 4]
