"""Two relays, or a relay and an operator, in transactions that overlap."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import psycopg
import pytest
from tests.interleaving.session import TOPIC, Session

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


def kill(session: psycopg.Connection[Any], *payloads: int) -> int:
    """The operator gives up events; returns how many."""
    return len(
        session.execute(
            "SELECT custody.outbox_kill(ARRAY(SELECT event_id FROM custody.outbox WHERE payload = ANY (%s)))",
            [[str(payload).encode() for payload in payloads]],
        ).fetchall()
    )


def test_a_relay_does_not_wait_for_an_event_that_an_operator_is_at(sessions: Sessions, events: None) -> None:
    operator, relay = sessions
    claim(relay, 10)
    relay.commit()
    assert kill(operator, 3) == 1
    extended = relay.execute(
        "SELECT convert_from(payload, 'UTF8')::int FROM custody.outbox WHERE id IN (SELECT custody.outbox_extend("
        "min(claimed_by), array_agg(id), '1 h', p_now => %s) FROM custody.outbox)",
        [NOW],
    ).fetchall()
    assert sorted(extended) == [(0,), (1,), (2,), (4,)]
    settled = relay.execute(
        "SELECT (s).status FROM (SELECT custody.outbox_settle(min(claimed_by), array_agg(id ORDER BY id), "
        "'{published, published}', '{NULL, NULL}', '{NULL, NULL}', 5, p_now => %s) AS s "
        "FROM custody.outbox WHERE payload IN ('3', '4')) x",
        [NOW],
    ).fetchall()
    assert sorted(settled) == [("CLAIMED",), ("PUBLISHED",)], "it is the operator's, and still to be settled"


def test_an_operator_does_not_give_up_what_was_published_meanwhile(one: Session, two: Session, events: None) -> None:
    claim(one.connection, 10)
    one.commit()
    settle(one.connection, 4, "published")
    killing = two.blocked(kill, two.connection, 4)
    one.commit()
    assert killing.result(10) == 0


def test_two_replays_at_once_replay_once(one: Session, two: Session, events: None) -> None:
    assert kill(one.connection, 3, 4) == 2
    one.commit()
    assert len(one.call("outbox_replay")) == 2
    second = two.blocked(two.call, "outbox_replay")
    one.commit()
    assert second.result(10) == []


@pytest.fixture
def write(c: custody.Custody, db: psycopg.Connection[Any]) -> Callable[..., None]:
    """Writes events for a topic of this database, one for each key. Their payloads count from 0 on."""
    c.create_topic(TOPIC)
    written = count()

    def _write(*keys: str | None) -> None:
        for key in keys:
            custody.outbox.write(db, event_type="e", payload=next(written), destination=TOPIC, ordering_key=key)

    return _write


def move(session: psycopg.Connection[Any], most: int = 1000) -> int:
    """How many events have left the outbox for the log."""
    row = session.execute("SELECT custody.move_outbox(1, 0, %s)", [most]).fetchone()
    assert row is not None
    return int(row[0])


def test_two_who_move_events_take_turns_without_waiting(
    c: custody.Custody, sessions: Sessions, write: Callable[..., None]
) -> None:
    """The second one would give its event an offset that the first one has given already."""
    first, second = sessions
    write(None)
    assert move(first) == 1
    write(None)
    assert move(second) == 0
    first.commit()
    second.commit()
    assert move(second) == 1
    second.commit()
    assert [message.payload for message in c.read(TOPIC)] == [0, 1]


def test_events_are_moved_in_their_order_up_to_the_limit(
    c: custody.Custody, sessions: Sessions, write: Callable[..., None]
) -> None:
    write(None, None, None)
    assert move(sessions[0], 2) == 2
    sessions[0].commit()
    assert [message.payload for message in c.read(TOPIC)] == [0, 1]


@pytest.mark.parametrize(
    ("held", "moved"),
    [((0,), [2, 3]), ((0, 3), [2, 4]), ((2,), [0, 1])],
    ids=["behind its key", "and one beside it", "without a key"],
)
def test_events_that_an_operator_is_at_are_passed_over(
    c: custody.Custody, sessions: Sessions, write: Callable[..., None], held: tuple[int, ...], moved: list[int]
) -> None:
    """Two are moved: those behind a held one in its key wait, and events beside them come in their place."""
    operator, mover = sessions
    write("k", "k", None, None, None)
    assert kill(operator, *held) == len(held)
    assert move(mover, 2) == 2
    mover.commit()
    assert [message.payload for message in c.read(TOPIC)] == moved


def test_events_of_a_topic_that_is_gone_are_ended_without_waiting_for_an_operator(
    c: custody.Custody, sessions: Sessions, write: Callable[..., None]
) -> None:
    operator, mover = sessions
    write(None, None)
    c.delete_topic(TOPIC)
    assert kill(operator, 0) == 1
    assert move(mover) == 0
    mover.commit()
    assert operator.execute("SELECT payload, last_error FROM custody.outbox WHERE payload = '1'").fetchall() == [
        (b"1", "its topic was deleted")
    ]


def claimed(session: psycopg.Connection[Any]) -> tuple[str, list[int]]:
    """The name of a claim of all events, until half a minute after NOW, and their ids."""
    assert len(claim(session, 10)) == 5
    session.commit()
    name, ids = session.execute("SELECT min(claimed_by), array_agg(id ORDER BY id) FROM custody.outbox").fetchall()[0]
    session.commit()
    return name, ids


def finish(
    session: psycopg.Connection[Any], name: str, ids: list[int], outcome: str = "published", now: str = NOW
) -> dict[int, str]:
    """The state of each event that the claim holds, after it was settled."""
    rows = session.execute(
        "SELECT id, status FROM custody.outbox_settle(%s, %s, array_fill(%s::text, ARRAY[cardinality(%s::bigint[])]), "
        "array_fill(NULL::text, ARRAY[cardinality(%s::bigint[])]), "
        "array_fill(NULL::float8, ARRAY[cardinality(%s::bigint[])]), 5, p_now => %s)",
        [name, ids, outcome, ids, ids, ids, now],
    ).fetchall()
    return dict(rows)


OVER = "2030-01-02 00:00:30"
OTHERS = pytest.mark.parametrize(
    ("name", "now"), [("another", NOW), (None, OVER)], ids=["another claim", "at its deadline"]
)


@pytest.mark.req("O7")
@OTHERS
@pytest.mark.parametrize("outcome", ["published", "failed"])
def test_only_a_claim_that_is_not_over_settles_and_extends(
    sessions: Sessions, events: None, name: str | None, now: str, outcome: str
) -> None:
    relay, operator = sessions
    own, ids = claimed(relay)
    everything = "SELECT array_agg(o ORDER BY id)::text FROM custody.outbox o"
    before = operator.execute(everything).fetchall()
    assert finish(relay, name or own, ids, outcome, now) == {}
    extend = "SELECT custody.outbox_extend(%s, %s, '1 h', p_now => %s)"
    assert relay.execute(extend, [name or own, ids, now]).fetchall() == []
    relay.commit()
    assert operator.execute(everything).fetchall() == before


@pytest.mark.req("O7")
@OTHERS
def test_an_event_that_an_operator_is_at_is_still_to_be_settled_by_its_own_claim_only(
    sessions: Sessions, events: None, name: str | None, now: str
) -> None:
    operator, relay = sessions
    own, ids = claimed(relay)
    operator.execute("SELECT FROM custody.outbox WHERE id = %s FOR UPDATE", [ids[4]])
    assert finish(relay, name or own, ids[4:], now=now) == {}
    assert finish(relay, own, ids[4:]) == {ids[4]: "CLAIMED"}


def test_an_event_that_was_taken_from_a_claim_does_not_hinder_those_behind_it(sessions: Sessions, events: None) -> None:
    operator, relay = sessions
    own, ids = claimed(relay)
    assert kill(operator, 0) == 1
    operator.commit()
    assert len(operator.execute("SELECT custody.outbox_replay()").fetchall()) == 1
    assert finish(relay, own, ids[:2]) == {ids[1]: "PUBLISHED"}


def test_a_claim_that_was_extended_meanwhile_is_not_ended(sessions: Sessions, events: None) -> None:
    """Whoever ends claims has chosen them before, without a lock."""
    relay, other = sessions
    own, ids = claimed(relay)
    other.execute("SELECT custody.outbox_expire(%s, 5, %s)", [ids, NOW])
    other.commit()
    assert len(finish(relay, own, ids)) == 5


def test_events_that_others_have_claimed_are_not_in_the_window(sessions: Sessions, events: None) -> None:
    first, _ = sessions
    assert claim(first, 3) == [0, 1, 2]
    (answer, *rows) = first.execute(
        "SELECT scanned FROM custody.outbox_claim('r', 9, '30 s', 5, p_window => 3, p_now => %s)", [NOW]
    ).fetchall()
    assert (answer, len(rows)) == ((None,), 2), "there is nothing behind the two that it has claimed"


@pytest.mark.req("C2", "O12")
@pytest.mark.parametrize("over", [False, True])
def test_a_claim_that_is_over_is_counted_as_a_retry_before_anybody_ends_it(
    sessions: Sessions, events: None, over: bool
) -> None:
    relay, _ = sessions
    claimed(relay)
    at = [OVER if over else NOW]
    figures = relay.execute(
        "SELECT backlog, due, retrying, claimed, oldest_pending IS NULL FROM custody.outbox_stats(p_now => %s)", at
    )
    assert figures.fetchall() == [(5, 5, 5, 0, False) if over else (0, 0, 0, 5, True)]
    unserved = relay.execute("SELECT * FROM custody.outbox_unserved('{other}', p_now => %s)", at)
    assert unserved.fetchall() == ([("test:", 5)] if over else [])


@pytest.mark.parametrize("first", ["outbox_add", "outbox_lock"])
def test_events_of_a_key_are_committed_in_the_order_of_their_ids(one: Session, two: Session, first: str) -> None:
    add = {"event_type": "e", "kind": "j", "payload": b"1", "destination": "test:"}
    if first == "outbox_lock":  # what a batch does before it writes
        one.call("outbox_lock", keys=["k"])
    else:
        one.call("outbox_add", **add, ordering_key="k")
    waiting = two.blocked(two.call, "outbox_add", **add, ordering_key="k")
    one.commit()
    assert waiting.result(10)
