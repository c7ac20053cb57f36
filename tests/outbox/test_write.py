"""Writing an event in the caller's own transaction."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import RFC_4122, UUID, uuid4

import psycopg
import pytest
from psycopg import sql
from psycopg.rows import dict_row
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.orm import Session
from tests.waiting import wait_for

import custody
from custody.errors import (
    InvalidArgument,
    InvalidPayload,
    OutboxRefused,
    SchemaMissing,
    SchemaNewer,
    SchemaOlder,
    TopicNotFound,
)
from custody.outbox import EventState, Outbox

pytestmark = pytest.mark.core


@pytest.fixture
def engine(outbox_url: str) -> Iterator[Engine]:
    made = create_engine(outbox_url.replace("postgresql://", "postgresql+psycopg://", 1))
    yield made
    made.dispose()


@pytest.mark.req("O1")
def test_event_and_business_change_share_one_fate(outbox: Outbox, mine: psycopg.Connection[Any]) -> None:
    mine.execute("CREATE TABLE orders (n int)")
    mine.commit()
    for n, end in ((1, mine.commit), (2, mine.rollback)):
        mine.execute("INSERT INTO orders VALUES (%s)", [n])
        custody.outbox.write(mine, event_type="placed", payload={"n": n}, destination="test:")
        assert len(outbox.events()) == (0 if n == 1 else 1)
        end()
    assert [event.payload for event in outbox.events()] == [{"n": 1}]
    assert mine.execute("SELECT n FROM orders").fetchall() == [(1,)]


@pytest.mark.req("O1")
def test_with_sqlalchemy_and_any_row_factory(outbox: Outbox, engine: Engine, outbox_url: str) -> None:
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE orders (n int)"))
        custody.outbox.write(connection, event_type="placed", payload=1)
    with Session(engine) as session:
        custody.outbox.write(session, event_type="placed", payload=2)
        session.rollback()
        custody.outbox.write(session, event_type="placed", payload=3)
        session.commit()
    with psycopg.connect(outbox_url, row_factory=dict_row) as connection:
        custody.outbox.write(connection, event_type="placed", payload=4)
    assert [event.payload for event in outbox.events()] == [1, 3, 4]


@pytest.mark.req("O2")
def test_ids_are_in_the_order_of_time(outbox: Outbox, mine: psycopg.Connection[Any]) -> None:
    """So that they lie side by side in their indexes: version 7, milliseconds first."""
    ids = [custody.outbox.write(mine, event_type="e", payload=n, destination="test:") for n in range(50)]
    mine.commit()
    assert len(set(ids)) == 50
    assert {(event_id.version, event_id.variant) for event_id in ids} == {(7, RFC_4122)}
    for event in outbox.events():
        assert abs((event.event_id.int >> 80) - event.created_at.timestamp() * 1000) < 1000


@pytest.mark.req("O2")
def test_the_fields_of_an_event(outbox: Outbox, mine: psycopg.Connection[Any]) -> None:
    later = datetime(2040, 1, 1, tzinfo=UTC)
    given = uuid4()
    event_id = custody.outbox.write(
        mine,
        event_type="placed",
        payload=b"\x00\xff",
        destination="test:x",
        headers={"trace": "1"},
        partition_key="p",
        ordering_key="o",
        available_at=later,
        event_id=given,
    )
    mine.commit()
    assert event_id == given
    event = outbox.event(event_id)
    assert (event.event_type, event.payload, event.destination, event.headers) == (
        *("placed", b"\x00\xff", "test:x", {"trace": "1"}),
    )
    assert (event.partition_key, event.ordering_key, event.available_at) == ("p", "o", later)
    assert (event.status, event.attempts, event.claimed_at, event.published_at) == (EventState.PENDING, 0, None, None)
    with pytest.raises(OutboxRefused, match="already"):
        custody.outbox.write(mine, event_type="placed", payload=1, event_id=given)


def test_from_plain_sql(outbox: Outbox, mine: psycopg.Connection[Any]) -> None:
    row = mine.execute(
        "SELECT custody.outbox_write('placed', '{\"n\": 1}', p_destination => 'test:', p_headers => '{\"a\": \"b\"}')"
    ).fetchone()
    mine.commit()
    assert row is not None
    event = outbox.event(UUID(str(row[0])))
    assert (event.payload, event.headers, event.destination) == ({"n": 1}, {"a": "b"}, "test:")


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"event_type": ""}, InvalidArgument),
        ({"payload": {1, 2}}, InvalidPayload),
        ({"headers": {"a": 1}}, InvalidPayload),
        ({"ordering_key": "a\0b"}, InvalidPayload),
        ({"available_at": datetime(2030, 1, 1)}, InvalidArgument),  # that it has no zone is the point
    ],
    ids=lambda value: str(value),
)
def test_bad_input_changes_nothing(
    outbox: Outbox, mine: psycopg.Connection[Any], wrong: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        custody.outbox.write(mine, **{"event_type": "placed", "payload": 1, **wrong})
    mine.rollback()
    assert outbox.events() == []


def test_headers_that_are_no_texts_are_refused_in_sql(mine: psycopg.Connection[Any]) -> None:
    for headers in ("[1]", '{"a": 1}'):
        with pytest.raises(psycopg.Error, match="object of texts"):
            mine.execute("SELECT custody.outbox_write('placed', '1', p_headers => %s)", [headers])
        mine.rollback()


@pytest.mark.parametrize("time", ["infinity", "-infinity", "10000-01-01Z", "0002-01-01 BC"])
def test_times_that_no_client_can_read_are_refused(outbox: Outbox, mine: psycopg.Connection[Any], time: str) -> None:
    with pytest.raises(psycopg.Error, match="cannot be available at") as refused:
        mine.execute("SELECT custody.outbox_write('placed', '1', p_available_at => %s)", [time])
    assert refused.value.diag.message_hint == "Give a time in the years 1 to 9999."
    mine.rollback()
    last = datetime(9999, 12, 31, 23, 59, 59, 999999, tzinfo=UTC)
    custody.outbox.write(mine, event_type="e", payload=1, destination="test:", available_at=last)
    mine.commit()
    for place in range(3):
        values = ", ".join(f"'{time}'" if number == place else "now()" for number in range(3))
        with pytest.raises(psycopg.errors.CheckViolation) as caught:
            mine.execute(
                "INSERT INTO custody.outbox (event_id, event_type, kind, payload, created_at, available_at, updated_at)"
                f" VALUES (gen_random_uuid(), 'e', 'j', '1', {values})".encode()
            )
        assert caught.value.diag.constraint_name == "outbox_times_in_years_1_to_9999"
        mine.rollback()
    assert [event.available_at for event in outbox.events()] == [last]


@pytest.mark.req("O3")
@pytest.mark.parametrize(
    "changes",
    [
        "suspect = 0",
        "claimed_with = -1",
        "available_at = 'infinity'",
        "status = 'CLAIMED', claimed_at = clock_timestamp(), claimed_by = 'x', expires_at = 'infinity'",
    ],
)
def test_no_update_by_hand_hides_an_event_from_relays(mine: psycopg.Connection[Any], changes: str) -> None:
    custody.outbox.write(mine, event_type="e", payload=1, destination="test:")
    with pytest.raises(psycopg.errors.CheckViolation):
        mine.execute(f"UPDATE custody.outbox SET {changes}".encode())


@pytest.mark.req("O10")
def test_writers_of_one_ordering_key_commit_in_the_order_of_their_ids(outbox: Outbox, outbox_url: str) -> None:
    """The second waits for the first; a writer of another key, or of none, waits for nobody."""
    with (
        psycopg.connect(outbox_url) as first,
        psycopg.connect(outbox_url) as second,
        psycopg.connect(outbox_url) as third,
        ThreadPoolExecutor(1) as thread,
    ):
        custody.outbox.write(first, event_type="e", payload=1, destination="test:", ordering_key="k")
        waiting = thread.submit(
            custody.outbox.write, second, event_type="e", payload=2, destination="test:", ordering_key="k"
        )

        def waits() -> bool:
            row = third.execute("SELECT cardinality(pg_blocking_pids(%s)) > 0", [second.info.backend_pid]).fetchone()
            third.rollback()
            return row == (True,)

        wait_for(waits, "the second writer does not wait")
        custody.outbox.write(third, event_type="e", payload=3, destination="test:", ordering_key="other")
        custody.outbox.write(third, event_type="e", payload=4, destination="test:")
        third.commit()
        assert {event.payload for event in outbox.events()} == {3, 4}
        first.commit()
        waiting.result(20)
        second.commit()
    of_key = [event.payload for event in outbox.events(ordering_key="k")]
    assert of_key == [1, 2]


@pytest.mark.req("O10")
def test_one_transaction_may_write_any_number_of_keys(mine: psycopg.Connection[Any]) -> None:
    """Each key with a lock of its own would be more than the server has memory for."""
    mine.execute(
        "SELECT count(custody.outbox_write('e', '1', 'test:', p_ordering_key => n::text)) "
        "FROM generate_series(1, 10000) n"
    )
    held = mine.execute(
        "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()"
    ).fetchone()
    assert held is not None
    assert 1000 < held[0] <= 4096


@pytest.mark.req("O10")
def test_those_who_lock_their_keys_first_never_wait_each_for_the_other(outbox_url: str) -> None:
    """Each writes its own keys, sorted; the locks that the keys share are in opposite orders."""
    with (
        psycopg.connect(outbox_url) as first,
        psycopg.connect(outbox_url) as second,
        psycopg.connect(outbox_url, autocommit=True) as looking,
        ThreadPoolExecutor(1) as thread,
    ):
        rows = looking.execute(
            "SELECT array_agg(n::text ORDER BY n::text) FROM generate_series(1, 20000) n "
            "GROUP BY custody.outbox_lock_of(n::text) HAVING count(*) > 1"
        )
        shared = sorted(row[0][:2] for row in rows)
        one, other = next((p, q) for p in shared for q in shared if p[0] < q[0] and q[1] < p[1])

        def write(connection: psycopg.Connection[Any], *keys: str) -> None:
            for key in keys:
                custody.outbox.write(connection, event_type="e", payload=1, destination="test:", ordering_key=key)

        def write_all(connection: psycopg.Connection[Any], keys: list[str]) -> None:
            custody.outbox.lock(connection, keys)
            write(connection, *keys)
            connection.commit()

        custody.outbox.lock(first, [one[0], other[0]])
        write(first, one[0])
        waiting = thread.submit(write_all, second, [other[1], one[1]])
        blocked = "SELECT cardinality(pg_blocking_pids(%s)) > 0"
        wait_for(
            lambda: looking.execute(blocked, [second.info.backend_pid]).fetchone() == (True,),
            "the second writer does not wait",
        )
        write(first, other[0])
        first.commit()
        waiting.result(20)


def test_an_unknown_topic_is_refused_where_all_of_custody_is(database_url: str, alone_url: str) -> None:
    with psycopg.connect(database_url) as whole:
        with pytest.raises(TopicNotFound):
            custody.outbox.write(whole, event_type="e", payload=1, destination="nothing")
        whole.rollback()
        custody.outbox.write(whole, event_type="e", payload=1, destination="nothing:")
    with psycopg.connect(alone_url) as alone:
        custody.outbox.write(alone, event_type="e", payload=1, destination="nothing")


def test_installing_twice_changes_nothing_and_all_of_custody_may_come_later(bare_url: str) -> None:
    with pytest.raises(SchemaMissing, match="outbox install"):
        Outbox(bare_url)
    assert custody.outbox.install(bare_url) is True
    assert custody.outbox.install(bare_url) is False
    with psycopg.connect(bare_url) as connection:
        custody.outbox.write(connection, event_type="e", payload=1, destination="test:")
        tables = connection.execute("SELECT relname FROM pg_class WHERE relname IN ('log', 'groups', 'topics')")
        assert tables.fetchall() == []
    with custody.connect(bare_url) as c:  # a database without all of Custody gets it, and keeps its outbox
        c.create_topic("orders")
    assert custody.outbox.install(bare_url) is False
    with Outbox(bare_url) as outbox:
        assert not outbox.alone
        assert [event.payload for event in outbox.events()] == [1]
        assert [finding for finding in outbox.verify() if not finding.passed] == []


@pytest.mark.req("O3")
def test_a_forbidden_update_by_hand_is_refused_with_a_reason(mine: psycopg.Connection[Any]) -> None:
    custody.outbox.write(mine, event_type="e", payload=1, destination="test:")
    mine.commit()
    with pytest.raises(psycopg.Error, match="cannot go from PENDING") as refused:
        mine.execute("UPDATE custody.outbox SET status = 'PUBLISHED', published_at = now()")
    assert refused.value.diag.message_detail == "outbox_refused"


@pytest.mark.req("O3")
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            "status = 'CLAIMED', claimed_at = now() - interval '1 h', claimed_by = 'x', expires_at = now()",
            "current time",
        ),
        ("status = 'CLAIMED', claimed_at = now(), claimed_by = 'x', expires_at = now()", "cannot be claimed"),
        ("status = 'PENDING', attempts = 1", "does not change"),
    ],
)
def test_a_claim_by_hand_is_refused_with_a_remedy(mine: psycopg.Connection[Any], changes: str, said: str) -> None:
    later = datetime.now(UTC) + timedelta(hours=1) if said == "cannot be claimed" else None
    custody.outbox.write(mine, event_type="e", payload=1, destination="test:", available_at=later)
    with pytest.raises(psycopg.Error, match=said):
        mine.execute(f"UPDATE custody.outbox SET {changes}".encode())


@pytest.mark.req("O3", "O11")
def test_a_replay_by_hand_is_refused_with_a_remedy(mine: psycopg.Connection[Any]) -> None:
    """A target that remembers events would take it for a repetition, and leave it out."""
    custody.outbox.write(mine, event_type="e", payload=1, destination="test:")
    free = "claimed_at = NULL, claimed_by = NULL, expires_at = NULL"
    for changes in (
        "status = 'CLAIMED', claimed_at = clock_timestamp(), claimed_by = 'x', expires_at = now() + interval '1 min'",
        f"status = 'PUBLISHED', published_at = now(), {free}",
    ):
        mine.execute(f"UPDATE custody.outbox SET {changes}".encode())
    with pytest.raises(psycopg.Error, match="outbox_replay"):
        mine.execute("UPDATE custody.outbox SET status = 'PENDING', published_at = NULL, attempts = 0")


@pytest.mark.req("O3")
def test_a_truncate_is_refused_while_events_are_open(outbox: Outbox, mine: psycopg.Connection[Any]) -> None:
    event = custody.outbox.write(mine, event_type="e", payload=1, destination="test:")
    mine.commit()
    with pytest.raises(psycopg.Error, match="open events"):
        mine.execute("TRUNCATE custody.outbox")
    mine.rollback()
    outbox.kill([event])
    mine.execute("TRUNCATE custody.outbox")
    mine.commit()
    assert outbox.events() == []


def test_installing_anew_keeps_triggers_of_a_user(alone_url: str) -> None:
    with psycopg.connect(alone_url) as connection:
        connection.execute("CREATE FUNCTION mine() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$")
        connection.execute("CREATE TRIGGER mine AFTER INSERT ON custody.outbox FOR EACH ROW EXECUTE FUNCTION mine()")
        before = connection.execute("SELECT tgname FROM pg_trigger WHERE NOT tgisinternal ORDER BY 1").fetchall()
        connection.execute("UPDATE custody.outbox_installed SET digest = 'older', release = 0")
    with pytest.raises(SchemaOlder):
        Outbox(alone_url)
    assert custody.outbox.install(alone_url) is True
    with psycopg.connect(alone_url) as connection:
        after = connection.execute("SELECT tgname FROM pg_trigger WHERE NOT tgisinternal ORDER BY 1").fetchall()
    assert ("mine",) in after
    assert after == before


@pytest.mark.parametrize("newer", ["version", "release"])
def test_an_outbox_of_newer_code_is_refused(alone_url: str, newer: str) -> None:
    with psycopg.connect(alone_url) as connection:
        change = sql.SQL("UPDATE custody.outbox_installed SET digest = 'newer', oldest = 2, {0} = {0} + 1").format(
            sql.Identifier(newer)
        )
        connection.execute(change)
    for attempt in (Outbox, custody.outbox.install, custody.migrate):
        with pytest.raises(SchemaNewer, match="Upgrade"):
            attempt(alone_url)
