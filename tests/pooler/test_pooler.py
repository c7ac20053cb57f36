"""Everything behind a connection pooler, which is detected: nothing is prepared, and no session keeps anything."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextlib import ExitStack, closing
from datetime import UTC
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict
from tests.databases import Copy
from tests.http.conftest import served
from tests.pooler.conftest import POOL, pgbouncer, through
from tests.upgrades import releases
from tests.upgrades.conftest import MIGRATE
from tests.upgrades.processes import running
from tests.waiting import wait_for

import custody
from custody import Constant, Outgoing, Policy, outbox
from custody.errors import Busy, DatabaseUnavailable, InvalidConfig
from custody.relay import Relay
from custody.store import adbc, connecting
from custody.store.connecting import Backend

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Run = Callable[..., Any]

pytestmark = [pytest.mark.pooler, pytest.mark.req("X3")]


def at_once(*calls: Callable[[], object]) -> None:
    """Runs them in a thread each; what they raise fails the test."""
    failed: list[BaseException] = []

    def run(call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=[call]) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert failed == []


def test_a_pooler_is_detected(pooled_url: str, database_url: str) -> None:
    with custody.connect(pooled_url) as pooled, custody.connect(database_url) as direct:
        assert pooled._db.pooled
        assert not direct._db.pooled
        with pooled._db.connection() as connection:
            assert connection.prepare_threshold is None


def test_many_clients_share_few_backends_and_none_runs_the_statement_of_another(pooled_url: str) -> None:
    """Each client works on its own topic; what a prepared statement of another would do shows at once."""

    def life(name: str) -> None:
        with custody.connect(pooled_url, pool_size=2, worker=name) as c:
            c.create_topic(name)
            c.create_group(name, "g", Policy(ordering="key", backoff=Constant("0s")))
            for n in range(20):
                receipt = c.publish(name, {"n": n}, key="k")
                assert (receipt.topic, receipt.offset) == (name, n)
                if n % 5 == 0:
                    c.create_group(name, f"other {n}".replace(" ", "-"))
                    c.delete_group(name, f"other-{n}")
                (message,) = c.claim(name, "g", max_messages=10)
                assert (message.topic, message.payload) == (name, {"n": n})
                assert message.published_at.tzinfo == UTC
                stats = c.stats(name, "g")
                assert (stats.topic, stats.in_flight) == (name, 1)
                lease_id = c.trace(name, 0, n)[-1].lease_id
                assert lease_id is not None
                assert c.ack(lease_id).settled == 1
            c.publish_many(name, list(range(200)))
            assert c.topic(name).message_count == 220

    at_once(*(lambda name=f"t{n}": life(name) for n in range(3 * POOL)))


def test_no_session_keeps_anything(pooled_url: str, db: psycopg.Connection, mode: str) -> None:
    database = sql.Identifier(str(conninfo_to_dict(pooled_url)["dbname"]))
    db.execute(sql.SQL("ALTER DATABASE {} SET timezone = 'Asia/Tokyo'").format(database))
    with custody.connect(pooled_url, statement_timeout="20s") as c:
        c.create_topic("t")
        receipts = c.publish_many("t", list(range(10)))
        assert len(receipts) == 10
        assert {message.published_at.tzinfo for message in c.read("t", max_messages=10)} == {UTC}
        with ExitStack() as stack:
            others = [stack.enter_context(psycopg.connect(pooled_url)) for _ in range(POOL)]
            for other in others:  # each in a transaction, so each on a backend of its own
                found = other.execute(
                    "SELECT current_setting('TimeZone'), current_setting('statement_timeout'), "
                    "current_setting('default_transaction_isolation'), (SELECT count(*) FROM pg_prepared_statements), "
                    "(SELECT count(*) FROM pg_listening_channels())"
                ).fetchone()
                assert found == ("Asia/Tokyo", "0", "read committed", 0, 0)


def test_a_statement_that_takes_too_long_is_given_up(pooled_url: str) -> None:
    with custody.connect(pooled_url, statement_timeout="300ms") as c:
        with pytest.raises(Busy), c._db.connection() as connection:
            connection.execute("SELECT pg_sleep(60)")
        c.create_topic("t")  # and the connection, or another one, goes on


def test_a_database_with_another_isolation_level_works(pooled_url: str, db: psycopg.Connection) -> None:
    database = sql.Identifier(str(conninfo_to_dict(pooled_url)["dbname"]))
    db.execute(sql.SQL("ALTER DATABASE {} SET default_transaction_isolation = 'serializable'").format(database))
    # backends of the pooler that were opened before know nothing of it
    db.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )
    with custody.connect(pooled_url) as c:
        assert c._db.isolation_default == "serializable"
        c.create_topic("t")
        c.create_group("t", "g")
        c.publish("t", 1)
        c.publish_many("t", [2, 3])
        lease = c.claim("t", "g", max_messages=3)
        assert [message.payload for message in lease] == [1, 2, 3]
        assert lease.ack().settled == 3


def test_a_worker_polls_and_with_a_direct_url_listens(pooled_url: str, database_url: str) -> None:
    with custody.connect(database_url) as near:
        near.create_topic("t")
        near.create_group("t", "g")
        near.publish_many("t", list(range(20)))
        for listen_url in (None, database_url):
            seen: list[int] = []
            with custody.connect(pooled_url, listen_url=listen_url) as c:
                worker = c.worker_for("t", "g", lambda m, seen=seen: seen.append(m.payload), poll="50ms")
                thread = threading.Thread(target=worker.run)
                thread.start()
                try:
                    near.publish("t", "more")
                    wait_for(lambda: near.stats("t", "g").depth == 0, "all is handled")
                finally:
                    worker.stop()
                    thread.join(30)
            assert "more" in seen
        heard = threading.Event()
        with custody.connect(pooled_url, listen_url=database_url) as c:
            end = c.listen("t", heard.set)
            try:
                wait_for(heard.is_set, "it listens")  # what may have come while nobody listened
                heard.clear()
                c.publish("t", "news")  # sent through the pooler
                wait_for(heard.is_set, "the notification has come")
            finally:
                end()


def test_a_server_behind_it_and_its_clients(pooled_url: str) -> None:
    with custody.connect(pooled_url, statement_timeout="30s", pool_size=8) as c, served(c) as server:
        assert server.get("/readyz").status == 200

        def client(name: str) -> None:
            with custody.connect(server.url, worker=name) as remote:
                remote.create_topic(name)
                remote.create_group(name, "g")
                for n in range(10):
                    remote.publish(name, n, key="k")
                    lease = remote.claim(name, "g")
                    assert [message.payload for message in lease] == [n]
                    lease.ack()
                assert remote.stats(name, "g").depth == 0

        at_once(*(lambda name=f"t{n}": client(name) for n in range(2 * POOL)))


def test_a_long_poll_is_served_without_notifications(pooled_url: str, database_url: str) -> None:
    with (
        custody.connect(pooled_url) as c,
        served(c) as server,
        custody.connect(database_url) as near,
    ):
        near.create_topic("t")
        near.create_group("t", "g")
        answers: list[Any] = []
        asking = threading.Thread(
            target=lambda: answers.append(json.loads(server.get("/messages/t?group=g&wait=20s").body))
        )
        asking.start()
        near.publish("t", "late")
        asking.join(25)
        assert [message["payload"] for message in answers[0]["messages"]] == ["late"]


def test_the_outbox_and_its_relays(pooled_url: str) -> None:
    with custody.connect(pooled_url) as c:
        c.create_topic("orders")
    with psycopg.connect(pooled_url, prepare_threshold=None) as mine:
        for n in range(60):
            where = "orders" if n % 2 else "test:"
            outbox.write(mine, event_type="placed", payload=n, destination=where, ordering_key=f"k{n % 5}")
    published: list[int] = []
    guard = threading.Lock()

    def publish(event: Any) -> None:
        with guard:
            published.append(event.payload)

    relays = [Relay(pooled_url, {"test": publish}, batch=5, poll="10ms") for _ in range(POOL)]
    at_once(*(lambda relay=relay: relay.drain("60s") for relay in relays))
    assert sorted(published) == list(range(0, 60, 2))
    with custody.connect(pooled_url) as c:
        wait_for(
            lambda: len(c.read("orders", max_messages=100)) == 30 or c.publish("orders", -1), "they are in the log"
        )


def test_the_schema_is_made_and_migrated_through_it(
    pooler: tuple[str, int], server_url: str, db: psycopg.Connection
) -> None:
    name = "custody_pooler_fresh"
    db.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))
    db.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
    try:
        parts = conninfo_to_dict(server_url)
        url = through(pooler, f"postgresql://{parts.get('user') or 'postgres'}@/{name}")
        at_once(*(lambda: custody.migrate(url) for _ in range(3)))
        assert custody.migrate(url) == []
        with custody.connect(url) as c:
            c.create_topic("t")
            assert c.publish("t", 1).offset == 0
    finally:
        db.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


def test_arrow_reads_in_transactions(pooled_url: str) -> None:
    from custody.spark.database import arrow

    with custody.connect(pooled_url) as c:
        c.create_topic("t", partitions=2 * POOL)
        for partition in range(2 * POOL):
            c.publish_many("t", [Outgoing(f"{partition} {n}", partition=partition) for n in range(100)])

    def read(partition: int) -> None:
        with arrow.Planner(pooled_url) as planner:
            for _ in range(5):
                reads = [one for some in planner.reads("t", partition, 0, 100) for one in some]
                found = [
                    value for batch in arrow.events(pooled_url, reads) for value in batch.column("payload").to_pylist()
                ]
                assert found == [f"{partition} {n}".encode() for n in range(100)]

    at_once(*(lambda partition=partition: read(partition) for partition in range(2 * POOL)))
    adbc.close_all()


def test_a_pipeline(pooled_url: str, spark: SparkSession) -> None:
    from custody.spark import Pipeline

    pipeline = Pipeline(source="in", group="g", sink="out", policy=Policy(ordering="key"))

    @pipeline.each
    def handle(message: custody.Message) -> object:
        return {"n": message.payload["n"]}

    with custody.connect(pooled_url) as c:
        c.create_topic("in", partitions=2)
        c.create_topic("out", partitions=2)
        c.publish_many("in", [Outgoing({"n": n}, key=f"k{n % 7}") for n in range(200)])
        summary = pipeline.run(c, spark=spark, drain="60s", batch_time="10m")
        assert (summary.done, summary.failed, summary.outputs) == (200, 0, 200)
        published = [message.payload["n"] for p in range(2) for message in c.read("out", p, max_messages=1000)]
        assert sorted(published) == list(range(200))


def test_the_doctor_says_what_it_found(pooled_url: str, database_url: str, run_cli: Run) -> None:
    def found(*arguments: str) -> dict[str, str]:
        checks = run_cli("doctor", "--json", *arguments)["checks"]
        (one,) = [check for check in checks if check["name"] == "connection"]
        return dict(one)

    assert found("--database", database_url) == {
        "name": "connection", "status": "ok", "message": "direct", "remedy": "",
    }  # fmt: skip
    behind = found("--database", pooled_url)
    assert (behind["status"], "pooler" in behind["message"]) == ("info", True)
    assert "listen" in behind["remedy"]
    heard = found("--database", pooled_url, "--listen-url", database_url)
    assert (heard["status"], heard["remedy"]) == ("ok", "")
    deaf = found("--database", pooled_url, "--listen-url", pooled_url + "&application_name=listener")
    assert (deaf["status"], deaf["remedy"]) == (behind["status"], behind["remedy"])


def test_a_setting_that_the_pooler_refuses_is_named(pooled_url: str) -> None:
    with pytest.raises(InvalidConfig, match=r"options.*ALTER ROLE"):
        custody.connect(f"{pooled_url}&options=-c%20work_mem%3D8MB")


def test_a_pooler_in_statement_mode_is_refused(server_url: str, database_url: str) -> None:
    """It takes no transactions: some verbs would work and others not."""
    with pgbouncer(server_url, "statement") as place:
        for opening in (custody.connect, custody.migrate):
            with pytest.raises(InvalidConfig, match="pool_mode = transaction"):
                opening(through(place, database_url))


@pytest.mark.parametrize("patience", [120.0, 0.0])
def test_a_pooler_whose_backends_are_all_at_work_is_waited_for(
    server_url: str, database_url: str, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch, patience: float
) -> None:
    """Then it answers nobody, as it does before a database that is silent, which is given up after a longer time."""
    monkeypatch.setattr(connecting, "SILENCE", 0.2)
    monkeypatch.setattr(connecting, "PROBE", 2)
    monkeypatch.setattr(connecting, "POOLER_SILENCE", patience)
    probed: list[str | None] = []
    state = Backend.state

    def noted(backend: Backend, waited: float) -> str | None:
        probed.append(state(backend, waited))
        return probed[-1]

    monkeypatch.setattr(Backend, "state", noted)
    with pgbouncer(server_url, "transaction") as place, custody.connect(through(place, database_url)) as c:
        c.create_topic("t")
        outcomes: list[object] = []

        def publish() -> None:
            try:
                outcomes.append(c.publish("t", 1).topic)
            except Exception as error:
                outcomes.append(type(error))

        callers = [threading.Thread(target=publish) for _ in range(POOL)]
        with db.transaction():
            db.execute("LOCK TABLE custody.topics IN ACCESS EXCLUSIVE MODE")
            for caller in callers:
                caller.start()
            wait_for(lambda: len(probed) >= POOL, "each was asked for on another connection", timeout=30)
        for caller in callers:
            caller.join(60)
    if patience:
        assert outcomes == ["t"] * POOL
    else:
        assert DatabaseUnavailable in outcomes  # then a backend is free, so that others may get an answer


@pytest.mark.parametrize("patience", [120.0, 0.0])
def test_a_read_into_arrow_waits_for_a_pooler_whose_backends_are_all_at_work(
    server_url: str, database_url: str, monkeypatch: pytest.MonkeyPatch, patience: float
) -> None:
    monkeypatch.setattr(connecting, "SILENCE", 0.2)
    monkeypatch.setattr(connecting, "PROBE", 2)
    monkeypatch.setattr(connecting, "POOLER_SILENCE", patience)
    probed: list[str | None] = []
    state = Backend.state

    def noted(backend: Backend, waited: float) -> str | None:
        probed.append(state(backend, waited))
        return probed[-1]

    with pgbouncer(server_url, "transaction") as place:
        url = through(place, database_url)
        assert [batch[0].to_pylist() for batch in adbc.fetch(url, ["SELECT 1 AS n"])] == [[1]]
        monkeypatch.setattr(adbc, "OPENING", 0.0)  # it holds for the opening alone
        monkeypatch.setattr(Backend, "state", noted)
        outcomes: list[object] = []

        def read() -> None:
            try:
                outcomes.extend(batch[0][0].as_py() for batch in adbc.fetch(url, ["SELECT 7 AS n FROM pg_sleep(1)"]))
            except Exception as error:
                outcomes.append(type(error))

        reader = threading.Thread(target=read)
        with ExitStack() as at_work:
            for _ in range(POOL):
                at_work.enter_context(psycopg.connect(url)).execute("SELECT 1")
            reader.start()
            wait_for(lambda: len(probed) >= (2 if patience else 1), "the pooler was asked", timeout=30)
        reader.join(60)
        adbc.close_all()
    assert outcomes == ([7] if patience else [DatabaseUnavailable])


def test_the_schema_is_upgraded_through_it_while_others_publish_and_consume(
    pooler: tuple[str, int], server_url: str, template: str, tmp_path: Path
) -> None:
    with closing(Copy(server_url, template)) as copy:
        pooled = through(pooler, copy.url)
        with custody.connect(copy.url) as c:
            c.create_topic("orders", partitions=2)
            c.create_group("orders", "stock", Policy(max_attempts=1000))
        second = releases.second(tmp_path / "second", copy.url)
        with running(releases.PACKAGE.parent, pooled, "old") as old, running(second, pooled, "new") as new:
            for one in (old, new):
                one.goes_on()
            assert releases.program(second, MIGRATE, pooled) == ["[2, 3]"]
            for one in (old, new):
                one.goes_on()
            assert [one.end()["errors"] for one in (old, new)] == [[], []]
