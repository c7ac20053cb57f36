"""A database that accepts and never answers: every call ends, says so, and the pool recovers when the database does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from tests.chaos.proxy import Proxy
from tests.http.conftest import served
from tests.waiting import wait_for

import custody
from custody.errors import Busy, DatabaseUnavailable
from custody.store import adbc, connecting, embedded
from custody.store.connecting import BoundedConnection

pytestmark = pytest.mark.req("X5")

ENDS = 30.0
"""Seconds within which everything has to end here; a quiet machine needs three or four."""


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same limits, shorter."""
    monkeypatch.setattr(connecting, "SILENCE", 0.5)
    monkeypatch.setattr(connecting, "PROBE", 2)
    monkeypatch.setattr(connecting, "GRACE", 0.5)
    monkeypatch.setattr(connecting, "CONNECT", 2)


@pytest.fixture
def proxy(database_url: str) -> Iterator[Proxy]:
    with closing(Proxy(database_url)) as opened:
        yield opened


@pytest.fixture
def c(proxy: Proxy) -> Iterator[custody.Custody]:
    """Custody through the proxy."""
    with custody.connect(proxy.url, worker="far", pool_size=4) as opened:
        opened._db._pool.timeout = 1.0  # ten seconds, else, in which no connection can be had
        opened.create_topic("t")
        opened.create_group("t", "g")
        yield opened


class Timed:
    def __enter__(self) -> Timed:
        self._since = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        assert time.monotonic() - self._since < ENDS, "it did not end in time"


def test_every_call_ends_and_the_pool_recovers(c: custody.Custody, proxy: Proxy) -> None:
    c.publish("t", "before")
    proxy.silence()
    for call in (
        lambda: c.publish("t", 1),
        lambda: c.publish_many("t", list(range(100))),  # COPY in a transaction
        lambda: c.claim("t", "g"),
        lambda: c.stats("t", "g"),
        c.ping,
    ):
        with Timed(), pytest.raises(DatabaseUnavailable):
            call()
    waiting: list[Exception] = []

    def ask() -> None:
        try:
            c.stats("t", "g")
        except Exception as error:
            waiting.append(error)

    callers = [threading.Thread(target=ask) for _ in range(8)]
    with Timed():
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join(ENDS)
    assert [type(error) for error in waiting] == [DatabaseUnavailable] * 8
    proxy.mend()

    def answers() -> bool:
        try:
            c.ping()
        except DatabaseUnavailable:
            return False
        return True

    wait_for(answers, "the pool has recovered", timeout=ENDS)
    assert c.publish("t", "after").offset >= 1


def test_a_silent_database_is_not_opened(proxy: Proxy, database_url: str) -> None:
    proxy.silence()
    with Timed(), pytest.raises(DatabaseUnavailable, match="timeout"):
        custody.connect(proxy.url)
    with Timed(), pytest.raises(DatabaseUnavailable):
        custody.migrate(proxy.url)


def test_a_call_that_takes_long_is_waited_for(c: custody.Custody) -> None:
    """The server answers on another connection, and says that it is at work."""
    with c._db.connection() as connection:
        assert connection.execute("SELECT 7 FROM pg_sleep(2)").fetchone() == (7,)


def test_the_very_server_of_a_call_is_asked_what_it_does(
    database_url: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The URL names two hosts. The first is away when the connection is opened, and is back during the call: its server
    knows nothing of the backend."""
    name = str(conninfo_to_dict(database_url)["dbname"])
    with (
        embedded.acquire(tmp_path_factory.mktemp("other")) as other,
        closing(Proxy(database_url)) as mine,
        closing(Proxy(make_conninfo(other.url, dbname=name))) as away,
    ):
        with psycopg.connect(other.url, autocommit=True) as connection:
            connection.execute(psycopg.sql.SQL("CREATE DATABASE {}").format(psycopg.sql.Identifier(name)))
        ports = [str(conninfo_to_dict(proxy.url)["port"]) for proxy in (away, mine)]
        away.sever()
        both = make_conninfo(mine.url, host="127.0.0.1,127.0.0.1", port=",".join(ports))
        with BoundedConnection.connect(both, autocommit=True) as connection:
            away.mend()
            assert connection.execute("SELECT 7 FROM pg_sleep(2)").fetchone() == (7,)


def test_a_connection_that_was_closed_while_idle_costs_no_call(database_url: str) -> None:
    """By a restart, or by idle_session_timeout."""
    with custody.connect(database_url, pool_size=3) as c, psycopg.connect(database_url, autocommit=True) as operator:
        c.create_topic("t")
        backends = "FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'custody'"
        operator.execute(f"SELECT pg_terminate_backend(pid) {backends}")
        wait_for(lambda: operator.execute(f"SELECT 1 {backends}").fetchone() is None, "its backends are gone")
        assert c.publish("t", 1).offset == 0


def test_the_limit_of_a_call_holds_though_the_server_sends_nothing(proxy: Proxy) -> None:
    with custody.connect(proxy.url, statement_timeout="300ms") as c:
        with pytest.raises(Busy), c._db.connection() as connection:  # a server that lives says it itself
            connection.execute("SELECT pg_sleep(60)")
        proxy.silence()
        with Timed(), pytest.raises(DatabaseUnavailable, match="not answered"), c._db.connection() as connection:
            connection.execute("SELECT 1")
        proxy.mend()


@pytest.mark.skipif(bool(os.environ.get("CUSTODY_TEST_DATABASE")), reason="the server may run on another machine")
@pytest.mark.parametrize("limit", ["300ms", None])
def test_a_backend_that_stands_still_is_given_up(database_url: str, limit: str | None) -> None:
    with custody.connect(database_url, statement_timeout=limit, pool_size=1) as c:
        c.create_topic("t")
        with c._db.connection() as connection:
            pid = connection.info.backend_pid
        os.kill(pid, signal.SIGSTOP)
        try:
            with Timed(), pytest.raises(DatabaseUnavailable, match="not answered"):
                c.publish("t", 1)
            assert c.topic("t").message_count == 0  # on another connection
        finally:
            os.kill(pid, signal.SIGCONT)


def test_a_server_answers_503_and_says_that_it_is_not_ready(proxy: Proxy) -> None:
    with custody.connect(proxy.url, statement_timeout="1s", pool_size=8) as c:
        c.create_topic("t")
        with served(c) as server:
            assert server.get("/readyz").status == 200
            proxy.silence()
            with Timed():
                answer = server.post("/messages", {"topic": "t", "payload": 1}, timeout=ENDS)
                assert (answer.status, answer.json["error"]["code"]) == (503, "database_unavailable")
            with Timed():
                ready = server.get("/readyz", timeout=ENDS)
                assert (ready.status, ready.json["error"]["code"]) == (503, "database_unavailable")
            assert server.get("/healthz").status == 200
            proxy.mend()
            wait_for(lambda: server.get("/readyz", timeout=ENDS).status == 200, "it is ready again", timeout=ENDS)
            assert server.post("/messages", {"topic": "t", "payload": 2}).status in (200, 201)


def test_a_worker_goes_on_when_the_database_does(c: custody.Custody, proxy: Proxy) -> None:
    seen: list[object] = []
    worker = c.worker_for("t", "g", lambda message: seen.append(message.payload), visibility_timeout="1s", poll="50ms")
    thread = threading.Thread(target=worker.run)
    thread.start()
    try:
        c.publish("t", 1)
        wait_for(lambda: seen == [1], "the first is handled")
        proxy.silence()
        wait_for(lambda: str(worker.waiting_for).startswith("the database"), "the worker has noticed", timeout=ENDS)
        proxy.mend()

        def published() -> bool:
            try:
                c.publish("t", 2)
            except DatabaseUnavailable:
                return False
            return True

        wait_for(published, "a publish arrives", timeout=ENDS)
        wait_for(lambda: 2 in seen, "the second is handled", timeout=ENDS)
    finally:
        worker.stop()
        thread.join(ENDS)


def test_a_command_ends_with_an_error(proxy: Proxy, tmp_path: Path) -> None:
    proxy.silence()
    url = proxy.url + "&connect_timeout=2"  # its own limit comes before ours
    for command in (["topics", "list"], ["doctor"]):
        with Timed():
            done = subprocess.run(
                [sys.executable, "-m", "custody", "--database", url, *command],
                cwd=tmp_path, capture_output=True, text=True, timeout=ENDS, check=False,
            )  # fmt: skip
        assert done.returncode == 1
        assert "cannot be reached" in done.stdout + done.stderr


def test_connections_have_limits_of_their_own_and_the_url_wins(database_url: str) -> None:
    with BoundedConnection.connect(database_url, autocommit=True) as connection:
        found = connection.info.get_parameters()
        assert {name: found[name] for name in ("keepalives_idle", "tcp_user_timeout", "connect_timeout")} == {
            "keepalives_idle": "10", "tcp_user_timeout": "30000", "connect_timeout": "2",
        }  # fmt: skip
    given = psycopg.conninfo.make_conninfo(database_url, keepalives_idle=77, tcp_user_timeout=5000, connect_timeout=9)
    with BoundedConnection.connect(given, autocommit=True) as connection:
        found = connection.info.get_parameters()
        assert {name: found[name] for name in ("keepalives_idle", "tcp_user_timeout", "connect_timeout")} == {
            "keepalives_idle": "77", "tcp_user_timeout": "5000", "connect_timeout": "9",
        }  # fmt: skip


LARGE = "SELECT n, repeat('x', 1000000) AS text FROM generate_series(1, 80) n"
"""More than all buffers on the way hold."""
PID = "SELECT pg_backend_pid() AS pid"


def read(url: str, statement: str) -> list[object]:
    """Its first column, read into Arrow. The driver would wait for ever, so a thread waits for this one."""
    outcome: list[list[object] | Exception] = []

    def run() -> None:
        try:
            outcome.append([value for batch in adbc.fetch(url, [statement]) for value in batch[0].to_pylist()])
        except Exception as error:
            outcome.append(error)

    reader = threading.Thread(target=run, daemon=True)
    reader.start()
    reader.join(ENDS)
    assert outcome, "the read did not end in time"
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    return outcome[0]


def driver_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "custody-arrow"]


def nothing_left(url: str, *pids: object) -> None:
    """The threads that were given up have ended, and so have their connections."""
    wait_for(lambda: driver_threads() == [], "every thread of the driver has ended", timeout=ENDS)
    with psycopg.connect(url, autocommit=True) as operator:
        left = "SELECT count(*) FROM pg_stat_activity WHERE pid = ANY(%s)"
        wait_for(lambda: operator.execute(left, [list(pids)]).fetchone() == (0,), "the backends are gone")


@pytest.fixture
def arrow_proxy(proxy: Proxy) -> Iterator[Proxy]:
    """For reads into Arrow; closes the connections that are kept for them."""
    yield proxy
    proxy.mend()
    wait_for(lambda: driver_threads() == [], "every thread of the driver has ended", timeout=ENDS)
    adbc.close_all()


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(b"user\0", id="before-the-login"),
        pytest.param(b"custody-arrow\0", id="before-the-login-of-the-driver"),
        pytest.param(b"pg_attribute", id="while-the-driver-opens"),
        pytest.param(b"COPY", id="before-the-statement"),
    ],
)
def test_a_first_read_into_arrow_ends(arrow_proxy: Proxy, database_url: str, words: bytes) -> None:
    arrow_proxy.silence_at(words)
    with pytest.raises(DatabaseUnavailable):
        read(arrow_proxy.url, "SELECT 7 AS n")
    arrow_proxy.mend()
    assert read(arrow_proxy.url, "SELECT 7 AS n") == [7]


def test_a_read_into_arrow_over_a_kept_connection_ends(arrow_proxy: Proxy, database_url: str) -> None:
    (kept,) = read(arrow_proxy.url, PID)
    assert read(arrow_proxy.url, PID) == [kept]
    arrow_proxy.silence()
    for _ in range(2):
        with pytest.raises(DatabaseUnavailable):
            read(arrow_proxy.url, PID)
    arrow_proxy.mend()
    assert read(arrow_proxy.url, PID) != [kept]
    nothing_left(database_url, kept)


def test_a_read_into_arrow_ends_in_the_middle_of_a_result(arrow_proxy: Proxy, database_url: str) -> None:
    batches = adbc.fetch(arrow_proxy.url, [LARGE])
    rest: list[object] = next(batches)[0].to_pylist()
    arrow_proxy.silence()

    def go_on() -> None:
        try:
            rest.extend(value for batch in batches for value in batch[0].to_pylist())
        except DatabaseUnavailable as error:
            rest.append(error)

    reader = threading.Thread(target=go_on, daemon=True)
    reader.start()
    reader.join(ENDS)
    *numbers, error = rest
    assert isinstance(error, DatabaseUnavailable)
    assert numbers == list(range(1, len(numbers) + 1))
    assert 0 < len(numbers) < 80
    arrow_proxy.mend()
    assert read(arrow_proxy.url, LARGE) == list(range(1, 81))
    nothing_left(database_url)


def test_a_read_into_arrow_goes_on_to_another_host_when_that_of_the_kept_connection_is_silent(
    arrow_proxy: Proxy, database_url: str
) -> None:
    with closing(Proxy(database_url)) as second, psycopg.connect(database_url, autocommit=True) as operator:
        ports = [str(conninfo_to_dict(proxy.url)["port"]) for proxy in (arrow_proxy, second)]
        both = make_conninfo(arrow_proxy.url, host="127.0.0.1,127.0.0.1", port=",".join(ports))
        (kept,) = read(both, PID)
        operator.execute("SELECT pg_terminate_backend(%s, 10000)", [kept])
        arrow_proxy.silence_at(b"user\0")
        assert read(both, PID) != [kept]
        adbc.close_all()


def test_a_statement_read_into_arrow_that_takes_long_is_waited_for(arrow_proxy: Proxy) -> None:
    assert read(arrow_proxy.url, "SELECT 7 AS n FROM pg_sleep(3)") == [7]
    assert read(arrow_proxy.url, "SELECT 8 AS n FROM pg_sleep(3)") == [8]


def test_a_connection_that_the_driver_cannot_open_is_given_up_though_the_server_answers(
    arrow_proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adbc, "OPENING", 2.0)
    arrow_proxy.silence_at(b"pg_attribute", alone=True)
    with pytest.raises(DatabaseUnavailable, match="not answered"):
        read(arrow_proxy.url, "SELECT 7 AS n")


@pytest.mark.skipif(bool(os.environ.get("CUSTODY_TEST_DATABASE")), reason="the server may run on another machine")
def test_a_backend_that_stands_still_is_given_up_by_a_read_into_arrow(database_url: str) -> None:
    (pid,) = read(database_url, PID)
    assert isinstance(pid, int)
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(DatabaseUnavailable, match="not answered"):
            read(database_url, PID)
        assert read(database_url, PID) != [pid]
    finally:
        os.kill(pid, signal.SIGCONT)
    nothing_left(database_url, pid)
    adbc.close_all()


def test_a_read_into_arrow_that_is_not_finished_holds_nothing(database_url: str) -> None:
    batches = adbc.fetch(database_url, [PID, LARGE])
    pid = next(batches)[0][0].as_py()
    assert driver_threads() != []
    batches.close()  # type: ignore[attr-defined]
    nothing_left(database_url, pid)


def test_a_fork_leaves_reads_into_arrow_to_the_parent(database_url: str) -> None:
    (kept,) = read(database_url, PID)
    batches = adbc.fetch(database_url, ["SELECT 1 AS n", "SELECT 2 AS n", PID])
    assert next(batches)[0].to_pylist() == [1]

    def in_child() -> None:
        with pytest.raises(custody.CustodyError, match="forked"):
            list(batches)
        batches.close()  # type: ignore[attr-defined]
        assert read(database_url, PID) != [kept]

    assert forked(in_child) == 0
    assert [batch[0][0].as_py() for batch in batches] == [2, kept]
    adbc.close_all()


def test_a_forked_process_that_ends_leaves_the_kept_connection_to_its_parent(database_url: str) -> None:
    script = """if True:
        import os, sys
        from custody.store.adbc import fetch

        def pid():
            (batch,) = fetch(sys.argv[1], ["SELECT pg_backend_pid()"])
            return batch[0][0].as_py()

        kept = pid()
        if os.fork() == 0:
            sys.exit()  # all its objects are finalized
        os.wait()
        assert pid() == kept
    """
    subprocess.run([sys.executable, "-W", "ignore", "-c", script, database_url], timeout=ENDS, check=True)


def forked(call: Callable[[], object]) -> int:
    """Calls it in a child; its exit status."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads of the driver and of Arrow
        child = os.fork()
    if child == 0:
        status = 1
        try:
            call()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
