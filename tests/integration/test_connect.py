"""Connecting: embedded, by URL, by the environment; and what happens when the database is wrong, away or back."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg.pq import TransactionStatus
from psycopg.pq.abc import PGconn
from psycopg.waiting import Wait
from tests.conftest import url_of
from tests.waiting import wait_for

import custody
from custody.errors import DatabaseUnavailable, InvalidArgument, IsolationLevel, SchemaInUse, SchemaNewer
from custody.store import embedded
from custody.store.connecting import BoundedConnection
from custody.store.postgres import Database, translate

PUBLISH = """
import sys, custody
with custody.connect() as c:
    if not c.topics():
        c.create_topic("orders")
    print(c.publish("orders", sys.argv[1]).offset, c.database_url, flush=True)
    sys.stdin.readline()
"""
READ = """
import custody
with custody.connect() as c:
    print([message.payload for message in c.read("orders")])
"""


def python(program: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


def test_processes_share_the_embedded_database_of_a_home_with_spaces(base: Path) -> None:
    home = base / "a home, with spaces"
    first = python(PUBLISH, "first", CUSTODY_HOME=str(home))
    assert first.stdout is not None
    offset, url = first.stdout.readline().split()
    assert (offset, url.startswith("postgresql://")) == ("0", True)
    with psycopg.connect(url) as connection:
        assert connection.execute("SELECT count(*) FROM custody.events").fetchone() == (1,)
    second = python(PUBLISH, "second", CUSTODY_HOME=str(home))
    assert second.communicate("\n", timeout=60)[0].startswith("1 ")
    first.communicate("\n", timeout=60)
    third = python(READ, CUSTODY_HOME=str(home))
    assert third.communicate(timeout=60)[0].strip() == "['first', 'second']", "it outlives the last process"
    assert [process.returncode for process in (first, second, third)] == [0, 0, 0]


def test_the_embedded_database_is_found_from_below_and_a_new_one_is_announced(
    base: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    below = base / "project" / "src"
    below.mkdir(parents=True)
    monkeypatch.delenv("CUSTODY_HOME", raising=False)
    monkeypatch.delenv("CUSTODY_DATABASE", raising=False)
    monkeypatch.chdir(below.parent)
    with custody.connect() as c:
        c.create_topic("orders")
        monkeypatch.chdir(below)
        with custody.connect() as again:
            assert [topic.name for topic in again.topics()] == ["orders"]
    announced = [record.getMessage() for record in caplog.records if record.name == "custody.connection"]
    assert announced == [
        f"a new database is made in {below.parent / '.custody'}: there is none here, nor in a directory above"
    ]


def test_a_home_may_be_given_and_beats_the_environment(
    base: Path, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUSTODY_DATABASE", database_url)
    with custody.connect(home=base / "home") as c:
        assert c.database_url != database_url
        assert c.topics() == []
    assert (base / "home" / "data").is_dir()


@pytest.mark.core
def test_a_url_is_used_as_it_is(database_url: str) -> None:
    with custody.connect(database_url) as c:
        assert c.database_url == database_url
        c.create_topic("orders")
    with custody.connect(database_url) as c:
        assert [topic.name for topic in c.topics()] == ["orders"]


@pytest.mark.core
def test_the_environment_names_the_database(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUSTODY_DATABASE", database_url)
    with custody.connect() as c:
        assert c.database_url == database_url


@pytest.mark.core
@pytest.mark.req("G8")
def test_the_file_names_the_database_and_the_defaults_of_groups(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUSTODY_DATABASE", raising=False)
    monkeypatch.chdir(tmp_path)
    delivery = "defaults: {topic: {delivery: {maxRetries: 8, visibilityTimeout: 2m}}}"
    (tmp_path / "custody.yaml").write_text(f"database: {database_url}\n{delivery}\n")
    with custody.connect() as c:
        c.create_topic("orders")
        policy = c.create_group("orders", "stock").policy
        assert policy is not None
        assert (policy.max_attempts, policy.columns()["visibility_timeout"]) == (8, "120.0 s")


def test_what_is_no_database_is_refused() -> None:
    for url in ("mysql://localhost/x", "localhost:5432", "/tmp/somewhere", "host=localhost"):
        with pytest.raises(InvalidArgument, match="Give a postgresql://"):
            custody.connect(url)
    for malformed in ("postgresql://[", "postgresql://localhost/db?no_such_option=1"):
        with pytest.raises(InvalidArgument):
            custody.connect(malformed)


@pytest.mark.core
def test_a_database_that_is_not_there_is_named(server_url: str) -> None:
    with pytest.raises(DatabaseUnavailable, match="no_such_database"):
        custody.connect(url_of(server_url, "no_such_database"))
    with pytest.raises(DatabaseUnavailable, match="Check that it runs"):
        custody.connect("postgresql://127.0.0.1:1/custody")


@pytest.mark.req("G20")
def test_the_remedy_of_a_refused_connection_is_for_its_reason(server_url: str) -> None:
    """The embedded server trusts its users, so the refusals of others are those of libpq, word for word."""
    remedies = {
        "connection is bad: connection to server on socket: No such file\n\tIs the server running?": "runs",
        'connection failed: FATAL:  password authentication failed for user "shop"': "user and password",
        "connection failed: fe_sendauth: no password supplied": "Give a password",
        'connection failed: FATAL:  no pg_hba.conf entry for host "10.0.0.7"': "pg_hba.conf of the server",
        "failed to resolve host 'db.example': [Errno -2] Name or service not known": "Check the host",
    }
    for reason, remedy in remedies.items():
        error = translate(psycopg.OperationalError(reason))
        assert remedy in error.remedy
        assert "\n" not in str(error)
        assert "?." not in str(error)
    with pytest.raises(DatabaseUnavailable, match="createdb"):
        custody.connect(url_of(server_url, "no_such_database"))


@pytest.mark.chaos
def test_a_stopped_database_is_unavailable_and_used_again_when_it_is_back(base: Path) -> None:
    home = base / "home"
    with custody.connect(home=home) as c:
        c.create_topic("orders")
        c.create_group("orders", "stock")
        c.publish("orders", 1)
        lease = c.claim("orders", "stock", visibility_timeout="10m")
        embedded.stop(home, "immediate")
        with pytest.raises(DatabaseUnavailable, match=r"Check that (it|the database) runs"):
            c.publish("orders", 2)
        with embedded.acquire(home):

            def works() -> bool:
                try:
                    return bool(c.topics())
                except DatabaseUnavailable:
                    return False

            wait_for(works, "the pool has found the database again")
            assert lease.ack().settled == 1
            assert c.publish("orders", 2).offset == 1


def test_an_embedded_database_is_neither_downgraded_nor_robbed_of_a_users_view(base: Path) -> None:
    with embedded.acquire(base / "home") as server, psycopg.connect(server.url, autocommit=True) as db:
        custody.connect(home=base / "home").close()
        db.execute("CREATE VIEW mine AS SELECT payload FROM custody.dead_letters")
        db.execute("UPDATE custody.release SET digest = 'another'")
        with pytest.raises(SchemaInUse, match="view mine"):
            custody.connect(home=base / "home")
        assert db.execute("SELECT count(*) FROM mine").fetchone() == (0,)
        db.execute("DROP VIEW mine; UPDATE custody.release SET release = release + 1, oldest = 2")
        with pytest.raises(SchemaNewer):
            custody.connect(home=base / "home")
        assert db.execute("SELECT digest FROM custody.release").fetchone() == ("another",)
        db.execute("UPDATE custody.release SET oldest = 1")
        custody.connect(home=base / "home").close()  # it serves code of this release, too
        assert db.execute("SELECT digest FROM custody.release").fetchone() == ("another",)
        db.execute("UPDATE custody.release SET release = release - 1")
        custody.connect(home=base / "home").close()


@pytest.mark.core
def test_a_cut_connection_costs_one_call(c: custody.Custody, db: psycopg.Connection) -> None:
    c.create_topic("orders")
    db.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )
    try:
        c.publish("orders", 1)
    except DatabaseUnavailable:
        c.publish("orders", 1)
    assert len(c.read("orders")) == 1


@pytest.mark.core
def test_an_interrupted_statement_leaves_a_connection_that_can_be_used(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever Ctrl-C comes: in the driver's wait, in ours around it, or in the driver's generator."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def statement(pgconn: PGconn) -> Iterator[Wait]:
        pgconn.send_query(b"SELECT pg_sleep(60)")
        yield Wait.W
        raise KeyboardInterrupt

    with BoundedConnection.connect(database_url, autocommit=True) as connection:
        with monkeypatch.context() as patched:
            patched.setattr(BoundedConnection, "_nothing_yet", interrupt)
            with pytest.raises(KeyboardInterrupt):
                connection.execute("SELECT pg_sleep(60)")
        assert connection.info.transaction_status == TransactionStatus.IDLE
        with pytest.raises(KeyboardInterrupt):
            connection.wait(statement(connection.pgconn))
        assert connection.info.transaction_status == TransactionStatus.IDLE
        assert connection.execute("SELECT 1").fetchone() == (1,)


def test_a_verb_in_another_isolation_level_is_refused(c: custody.Custody, database_url: str) -> None:
    c.create_topic("orders")
    c.create_group("orders", "stock")
    db = Database(database_url)
    try:
        with psycopg.connect(database_url) as connection:
            connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            with pytest.raises(IsolationLevel, match="Use READ COMMITTED"):
                db.call("claim", on=connection, topic="orders", group="stock")
    finally:
        db.close()


@pytest.mark.core
@pytest.mark.req("G20")
def test_an_argument_of_a_strange_type_is_the_callers_error(c: custody.Custody) -> None:
    c.create_topic("orders")
    with pytest.raises(InvalidArgument):
        c.create_topic(object())  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument):
        c.read("orders", "first")  # type: ignore[arg-type]


@pytest.mark.core
def test_a_closed_custody_can_be_closed_again(database_url: str) -> None:
    c = custody.connect(database_url)
    c.close()
    c.close()
