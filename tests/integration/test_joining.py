"""Settling in the caller's own transaction, and a consumer's own record of what it has processed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import psycopg
import psycopg2
import pytest
from psycopg.rows import dict_row
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.orm import Session
from tests.waiting import wait_for

import custody
from custody.errors import InvalidArgument, IsolationLevel, LeaseLost

pytestmark = pytest.mark.req("G21")


@pytest.fixture
def orders(c: custody.Custody, db: psycopg.Connection) -> custody.Custody:
    """Three messages, and a table for results."""
    c.create_topic("orders")
    c.create_group("orders", "g", custody.Policy(max_attempts=2))
    c.publish_many("orders", [1, 2, 3])
    db.execute("CREATE TABLE results (n int)")
    return c


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    made = create_engine(database_url.replace("postgresql://", "postgresql+psycopg://", 1))
    yield made
    made.dispose()


def results(db: psycopg.Connection) -> list[int]:
    return [n for (n,) in db.execute("SELECT n FROM results ORDER BY n")]


def open_messages(c: custody.Custody) -> int:
    stats = c.stats("orders", "g")
    return stats.depth


def test_results_and_ack_are_committed_together(
    orders: custody.Custody, db: psycopg.Connection, database_url: str
) -> None:
    lease = orders.claim("orders", "g", max_messages=3)
    with psycopg.connect(database_url, row_factory=dict_row) as mine:
        for message in lease.messages[:2]:
            mine.execute("INSERT INTO results VALUES (%s)", [message.payload])
            lease.ack(message, connection=mine)
        assert (results(db), open_messages(orders)) == ([], 3)
        mine.commit()
        assert (results(db), open_messages(orders)) == ([1, 2], 1)
        mine.execute("INSERT INTO results VALUES (3)")
        lease.ack(connection=mine)
        mine.rollback()
    assert (results(db), open_messages(orders)) == ([1, 2], 1)
    lease.ack()
    assert open_messages(orders) == 0


def test_every_verb_of_a_lease_joins(orders: custody.Custody, database_url: str) -> None:
    lease = orders.claim("orders", "g", max_messages=3)
    first, second, third = lease.messages
    with psycopg.connect(database_url) as mine, mine.transaction(force_rollback=True):
        lease.nack(first, error="no", requeue=False, connection=mine)
        lease.later(second, after="1h", connection=mine)
        lease.release(third, connection=mine)
    assert (orders.stats("orders", "g").in_flight, orders.stats("orders", "g").dead) == (3, 0)
    with psycopg.connect(database_url) as mine:
        lease.nack(first, error="no", requeue=False, connection=mine)
        lease.later(second, after="1h", connection=mine)
        lease.release(third, connection=mine)
    assert (orders.stats("orders", "g").in_flight, orders.stats("orders", "g").dead) == (0, 1)


def test_a_lost_lease_takes_the_results_back(
    orders: custody.Custody, db: psycopg.Connection, database_url: str
) -> None:
    lease = orders.claim("orders", "g", max_messages=1)
    lease.release()
    mine = psycopg.connect(database_url)
    mine.execute("INSERT INTO results VALUES (1)")
    with pytest.raises(LeaseLost), mine:
        lease.ack(lease.messages[0], connection=mine)
    assert results(db) == []


@pytest.mark.parametrize("style", ["session", "connection", "connection without a statement", "begun"])
def test_a_transaction_of_sqlalchemy(
    orders: custody.Custody, db: psycopg.Connection, engine: Engine, style: str
) -> None:
    lease = orders.claim("orders", "g", max_messages=3)
    message = lease.messages[0]
    if style == "session":
        with Session(engine) as session:
            session.execute(text("INSERT INTO results VALUES (1)"))
            lease.ack(message, connection=session)
            assert open_messages(orders) == 3
            session.commit()
    elif style == "begun":
        with engine.begin() as connection:
            connection.execute(text("INSERT INTO results VALUES (1)"))
            lease.ack(message, connection=connection)
    else:
        with engine.connect() as connection:
            lease.ack(message, connection=connection)
            if "without" not in style:
                connection.execute(text("INSERT INTO results VALUES (1)"))
            assert open_messages(orders) == 3
            connection.commit()
    assert open_messages(orders) == 2
    assert results(db) == ([] if "without" in style else [1])
    with Session(engine) as session:
        lease.ack(connection=session)
    assert open_messages(orders) == 2, "closed without a commit"


def test_what_is_no_connection_is_refused(orders: custody.Custody, database_url: str) -> None:
    lease = orders.claim("orders", "g")
    for wrong in (object(), database_url, create_engine("sqlite://").connect()):
        with pytest.raises(InvalidArgument, match="is not a connection of psycopg, nor one of SQLAlchemy or Django"):
            lease.ack(connection=wrong)
    with psycopg.connect(database_url) as mine:
        mine.isolation_level = psycopg.IsolationLevel.SERIALIZABLE
        with pytest.raises(IsolationLevel):
            lease.ack(connection=mine)
    assert open_messages(orders) == 3


@pytest.mark.req("X12")
def test_psycopg2_is_refused_with_the_reason(orders: custody.Custody, database_url: str) -> None:
    lease = orders.claim("orders", "g")
    engine = create_engine(database_url.replace("postgresql://", "postgresql+psycopg2://", 1))
    with closing(psycopg2.connect(database_url)) as old, engine.connect() as of_sqlalchemy:
        for connection in (old, of_sqlalchemy):
            with pytest.raises(InvalidArgument, match="psycopg2, which has no binary parameters") as refused:
                lease.ack(connection=connection)
            assert "psycopg 3" in refused.value.remedy
            with pytest.raises(InvalidArgument, match="psycopg2"):
                custody.once(connection, "g", lease.messages[0])
    engine.dispose()
    assert open_messages(orders) == 3


@pytest.mark.req("X12")
def test_a_connection_whose_cursors_put_values_into_the_text(orders: custody.Custody, database_url: str) -> None:
    """As those of Django do."""
    message = orders.claim("orders", "g", max_messages=2).messages[0]
    with psycopg.connect(database_url, cursor_factory=psycopg.ClientCursor, row_factory=dict_row) as mine:
        lease = orders.claim("orders", "g")
        lease.nack(error="no", requeue=False, connection=mine)
        assert custody.once(mine, "g", message)
        assert not custody.once(mine, "g", message)
    assert orders.stats("orders", "g").dead == 1


# once


def test_a_message_is_processed_once(orders: custody.Custody, database_url: str) -> None:
    message, other = orders.claim("orders", "g", max_messages=2).messages
    with psycopg.connect(database_url, row_factory=dict_row) as mine:
        assert custody.once(mine, "g", message)
        assert not custody.once(mine, "g", message), "in the same transaction too"
        mine.rollback()
        assert custody.once(mine, "g", message), "it was taken back"
        mine.commit()
        assert not custody.once(mine, "g", message)
        assert custody.once(mine, "another", message)
        assert custody.once(mine, "g", other)


def test_it_waits_for_one_who_is_at_it(orders: custody.Custody, database_url: str) -> None:
    message = orders.claim("orders", "g").messages[0]
    with psycopg.connect(database_url) as first, psycopg.connect(database_url) as second:
        custody.once(first, "g", message)
        first.commit()
        first.execute("DELETE FROM custody_once")
        first.commit()
        assert custody.once(first, "g", message)
        answers: list[bool] = []
        waiting = threading.Thread(target=lambda: answers.append(custody.once(second, "g", message)))
        waiting.start()
        with psycopg.connect(database_url, autocommit=True) as watching:
            wait_for(
                lambda: (
                    watching.execute(
                        "SELECT count(*) FROM pg_locks WHERE NOT granted AND pid = %s", [second.info.backend_pid]
                    ).fetchone()
                    == (1,)
                ),
                "the second one waits",
            )
        first.rollback()
        waiting.join(10)
        assert answers == [True]


def test_two_who_come_first_make_one_table(orders: custody.Custody, database_url: str) -> None:
    messages = orders.claim("orders", "g", max_messages=2).messages
    together = threading.Barrier(2)
    answers: list[bool] = []

    def process(message: custody.Message) -> None:
        with psycopg.connect(database_url) as mine:
            together.wait(10)
            answers.append(custody.once(mine, "g", message))

    threads = [threading.Thread(target=process, args=[message]) for message in messages]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert answers == [True, True]


def test_old_records_are_forgotten(orders: custody.Custody, database_url: str) -> None:
    message = orders.claim("orders", "g").messages[0]
    with psycopg.connect(database_url) as mine:
        assert custody.forget_once(mine, older_than="1d") == 0
        custody.once(mine, "g", message)
        mine.execute("UPDATE custody_once SET at = now() - interval '2 days'")
        assert custody.forget_once(mine, older_than="3d") == 0
        assert custody.forget_once(mine, older_than="1d") == 1
        assert custody.once(mine, "g", message)


def test_one_who_may_not_make_the_table_is_told_how(orders: custody.Custody, database_url: str) -> None:
    message = orders.claim("orders", "g").messages[0]
    with psycopg.connect(database_url) as mine:
        mine.execute("CREATE ROLE nobody_special")
        mine.execute("SET ROLE nobody_special")
        with pytest.raises(
            InvalidArgument, match=r"this user may not create it.*CREATE TABLE IF NOT EXISTS custody_once"
        ):
            custody.once(mine, "g", message)
        mine.rollback()


@pytest.mark.req("X1")
@pytest.mark.parametrize("whole", [True, False])
def test_a_partly_lost_lease_takes_all_of_the_results_back(
    orders: custody.Custody, db: psycopg.Connection, database_url: str, whole: bool
) -> None:
    lease = orders.claim("orders", "g", max_messages=3)
    orders.rewind("orders", "g", to_offset=2)
    with psycopg.connect(database_url) as mine:
        mine.execute("INSERT INTO results VALUES (1), (2), (3)")
        with pytest.raises(LeaseLost, match="does not hold offset 2") as lost:
            lease.ack(*([] if whole else [lease.messages]), connection=mine)
        assert lost.value.lost == (2,)
        mine.commit()  # PostgreSQL rolls back: nothing can go through by mistake
    assert (results(db), orders.stats("orders", "g").in_flight) == ([], 2)
    with psycopg.connect(database_url) as mine:
        mine.execute("INSERT INTO results VALUES (1), (2)")
        lease.ack(lease.messages[:2], connection=mine)
    assert (results(db), open_messages(orders)) == ([1, 2], 1)


@pytest.mark.req("X1")
@pytest.mark.parametrize(
    "verb",
    [
        lambda lease, mine: lease.nack(connection=mine),
        lambda lease, mine: lease.release(connection=mine),
        lambda lease, mine: lease.later(after="1m", connection=mine),
    ],
)
def test_a_loss_refuses_every_verb_in_a_transaction_and_a_savepoint_saves_it(
    orders: custody.Custody, db: psycopg.Connection, database_url: str, verb: Any
) -> None:
    lease = orders.claim("orders", "g", max_messages=3)
    orders.rewind("orders", "g", to_offset=1)
    with psycopg.connect(database_url) as mine:
        mine.execute("INSERT INTO results VALUES (7)")
        with pytest.raises(LeaseLost) as lost, mine.transaction():
            verb(lease, mine)
        assert lost.value.lost == (1, 2)
    assert (results(db), orders.stats("orders", "g").in_flight) == ([7], 1)


@pytest.mark.req("X1")
@pytest.mark.parametrize("whole", [True, False])
def test_a_transaction_that_is_run_again_after_its_commit_is_refused(
    orders: custody.Custody, db: psycopg.Connection, database_url: str, whole: bool
) -> None:
    """Else its results would be there twice: outside of a transaction the same ack is a success."""
    lease = orders.claim("orders", "g", max_messages=3)

    def run() -> None:
        with psycopg.connect(database_url) as mine:
            mine.execute("INSERT INTO results VALUES (1), (2), (3)")
            lease.ack(*([] if whole else [lease.messages]), connection=mine)

    run()
    with pytest.raises(LeaseLost):
        run()
    assert results(db) == [1, 2, 3]
    assert lease.ack().already


@pytest.mark.req("X1")
def test_an_ack_that_was_rolled_back_counts_as_not_settled(orders: custody.Custody, database_url: str) -> None:
    lease = orders.claim("orders", "g", max_messages=3)
    with psycopg.connect(database_url) as mine:
        lease.ack(lease.messages[0], connection=mine)
        mine.rollback()
        orders.rewind("orders", "g", to_offset=2)
        with pytest.raises(LeaseLost) as lost:
            lease.ack(connection=mine)
    assert lost.value.lost == (2,)
