"""Tables of relational databases: each done message is in them once, and a row that a table refuses dies alone."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import custody
from custody.errors import InvalidArgument, PipelineFailed, PipelineRefused
from custody.spark import Files, Jdbc, Pipeline, PipelineSummary, Write, fail_when
from custody.spark.outside.jdbc_table import JdbcTable, address_of
from custody.verbs.pipelines import DriverVerbs

pytestmark = [pytest.mark.req("X9", "S5"), pytest.mark.timeout(300)]
ONCE = custody.Policy(ordering="key", max_attempts=1)
ROW = "n int, name string"
Execute = Callable[..., list[Any]]


@pytest.fixture
def c(database_url: str) -> Iterator[custody.Custody]:
    """Custody with the server's own clock: Spark's processes know no other."""
    with custody.connect(database_url, worker="test") as opened:
        opened.create_topic("in", partitions=2)
        opened.create_topic("out", partitions=2)
        yield opened


@pytest.fixture(params=["postgresql", pytest.param("sqlite", marks=pytest.mark.chaos)])
def url(request: pytest.FixtureRequest, bare_url: str, tmp_path: Path) -> str:
    """The database of the tables: another one of the server, or a file."""
    return bare_url if request.param == "postgresql" else f"sqlite:///{tmp_path}/shop.db"


@pytest.fixture
def execute(url: str) -> Execute:
    def run(statement: str) -> list[Any]:
        if url.startswith("sqlite"):
            connection = sqlite3.connect(url.removeprefix("sqlite:///"))
            try:
                found = connection.execute(statement).fetchall()
                connection.commit()
                return found
            finally:
                connection.close()
        with psycopg.connect(url, autocommit=True) as opened:
            cursor = opened.execute(statement)  # type: ignore[call-overload]
            return cursor.fetchall() if cursor.description else []

    return run


def publish(c: custody.Custody, numbers: range | list[int]) -> None:
    c.publish_many("in", [custody.Outgoing({"n": n, "name": f"name {n}"}, key=f"k{n % 7}") for n in numbers])


def run(pipeline: Pipeline, c: custody.Custody, spark: SparkSession, **settings: Any) -> PipelineSummary:
    return pipeline.run(c, spark=spark, **({"drain": "30s", "batch_time": "10m"} | settings))


def passing(*sinks: Any, policy: custody.Policy = ONCE) -> Pipeline:
    pipeline = Pipeline(source="in", group="g", sink=["out", *sinks], policy=policy, schema=ROW)
    pipeline.frame(lambda frame: frame.select("_partition", "_offset", "_key", "n", "name"))
    return pipeline


def published(c: custody.Custody) -> list[int]:
    return sorted(m.payload["n"] for p in range(2) for m in c.read("out", p, max_messages=1000))


def crash(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, *, before: bool) -> list[str]:
    """The first call fails, before or after its deed. Nothing is cleared away, as if the process had died."""
    real, crashed = getattr(owner, name), list[str]()

    def call(*arguments: Any, **named: Any) -> Any:
        if not crashed and before:
            crashed.append(name)
            raise OSError("crashed")
        found = real(*arguments, **named)
        if not crashed:
            crashed.append(name)
            raise OSError("crashed")
        return found

    monkeypatch.setattr(owner, name, call)
    return crashed


def test_a_table_has_each_done_message_once_and_refused_rows_die_alone(
    c: custody.Custody, spark: SparkSession, url: str, execute: Execute, tmp_path: Path
) -> None:
    execute("CREATE TABLE rows (n int NOT NULL CHECK (n NOT IN (3, 20)), name varchar(20), seen int DEFAULT 1)")
    publish(c, range(30))
    summary = run(passing(Jdbc(url, "rows"), Files(tmp_path / "files")), c, spark, max_per_batch=15)
    assert (summary.done, summary.dead, summary.restarts) == (28, 2, 0)
    good = sorted({*range(30)} - {3, 20})
    assert [n for (n,) in execute("SELECT n FROM rows ORDER BY n")] == good
    assert published(c) == sorted(row["n"] for row in spark.read.parquet(str(tmp_path / "files")).collect()) == good
    errors = {letter.payload["n"]: letter.last_error or "" for letter in c.dead("in", "g")}
    assert set(errors) == {3, 20}
    assert all("check constraint" in error.lower() for error in errors.values()), errors
    assert execute("SELECT count(*) FROM custody_staged") == [(0,)]
    ((claim,),) = execute("SELECT claim FROM custody_claims")
    assert claim >= 2


def test_an_upsert_leaves_the_last_row_of_each_key(
    c: custody.Custody, spark: SparkSession, url: str, execute: Execute
) -> None:
    execute("CREATE TABLE latest (name varchar(20) PRIMARY KEY, n int, tags text, _offset bigint)")
    pipeline = Pipeline(source="in", group="g", policy=ONCE)
    pipeline.outside = (Jdbc(url, "latest", "upsert", key="name", schema="name string, n int, tags array<string>"),)

    @pipeline.each
    def twice(message: custody.Message) -> list[dict[str, Any]]:
        name, n = message.key, message.payload["n"]
        return [{"name": name, "n": -n, "tags": None}, {"name": name, "n": n, "tags": [f"a{n}"]}]

    publish(c, range(40))
    assert run(pipeline, c, spark, max_per_batch=25).done == 40
    found = execute("SELECT name, n, tags, _offset FROM latest ORDER BY name")
    last = {n % 7: n for n in range(40)}
    assert [row[:3] for row in found] == [(f"k{key}", n, f'["a{n}"]') for key, n in sorted(last.items())]
    assert all(offset is not None for *_, offset in found)


def test_a_claim_without_rows_is_the_first(c: custody.Custody, spark: SparkSession, bare_url: str) -> None:
    with psycopg.connect(bare_url, autocommit=True) as db:
        db.execute("CREATE TABLE rows (n int)")
        publish(c, range(4))
        pipeline = Pipeline(source="in", group="g", sink=["out", Jdbc(bare_url, "rows", schema="n int")], policy=ONCE)
        pipeline.each(lambda _: None)
        summary = run(pipeline, c, spark)
        assert (summary.done, summary.restarts) == (4, 0)
        assert db.execute("SELECT count(*) FROM rows").fetchone() == (0,)


CRASHES = [(DriverVerbs, "commit", True), (DriverVerbs, "commit", False), (Jdbc, "show", True), (Jdbc, "show", False)]


@pytest.mark.parametrize(
    ("owner", "name", "before"),
    [CRASHES[1], *(pytest.param(*one, marks=pytest.mark.chaos) for one in CRASHES if one != CRASHES[1])],
)
def test_a_crash_around_the_commit_leaves_each_row_once(
    c: custody.Custody, spark: SparkSession, bare_url: str, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str,
    before: bool,
) -> None:  # fmt: skip
    with psycopg.connect(bare_url, autocommit=True) as db:
        db.execute("CREATE TABLE rows (n int, _partition int, _offset bigint)")
        publish(c, range(20))
        crashed = crash(monkeypatch, owner, name, before=before)
        pipeline = Pipeline(source="in", group="g", sink=["out", Jdbc(bare_url, "rows")], policy=ONCE, schema=ROW)
        pipeline.frame(lambda frame: frame.select("_partition", "_offset", "_key", "n"))
        run(pipeline, c, spark, max_per_batch=10)
        assert crashed == [name]
        rows = db.execute("SELECT n FROM rows ORDER BY n").fetchall()
        assert [n for (n,) in rows] == published(c) == [*range(20)]
        assert db.execute("SELECT count(*) FROM custody_staged").fetchone() == (0,)


@pytest.mark.chaos
def test_a_transaction_that_is_lost_after_the_commit_is_inserted_again(
    c: custody.Custody, spark: SparkSession, bare_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when it was idle for too long, because the commit had to wait for a topic."""
    name = psycopg.conninfo.conninfo_to_dict(bare_url)["dbname"]
    publish(c, range(20))
    with psycopg.connect(bare_url, autocommit=True) as db:
        db.execute("CREATE TABLE rows (n int, name text)")
        real = DriverVerbs.commit

        def commit(*arguments: Any, **named: Any) -> Any:
            committed = real(*arguments, **named)
            ended = "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE datname = %s AND state = %s"
            assert db.execute(ended, [name, "idle in transaction"]).fetchall() == [(True,)]
            return committed

        monkeypatch.setattr(DriverVerbs, "commit", commit)
        summary = run(passing(Jdbc(bare_url, "rows")), c, spark, max_per_batch=10)
        assert summary.restarts == 0
        assert [n for (n,) in db.execute("SELECT n FROM rows ORDER BY n")] == [*range(20)]


@pytest.mark.chaos
def test_rows_of_messages_whose_lease_was_lost_are_not_there_twice(
    c: custody.Custody, db: psycopg.Connection, spark: SparkSession, url: str, execute: Execute
) -> None:
    execute("CREATE TABLE rows (n int)")
    publish(c, range(20))
    pipeline = passing(Jdbc(url, "rows"))
    pipeline.transform = lambda frame: frame.select("_partition", "_offset", "_key", "n")
    times: list[int] = []

    @pipeline.write  # after the table, which has its rows already
    def take_away(_rows: DataFrame, _write: Write) -> None:
        times.append(0)
        if len(times) == 1:
            db.execute("UPDATE custody.leases SET deadline = now() - interval '1 s' WHERE partition = 0")
        elif len(times) == 3:
            db.execute("UPDATE custody.leases SET deadline = now() - interval '1 s'")

    troubles: list[str] = []
    run(pipeline, c, spark, max_per_batch=14, on_trouble=troubles.append)
    assert "whose results were written are done" in troubles[0]
    assert [n for (n,) in execute("SELECT n FROM rows ORDER BY n")] == published(c) == [*range(20)]


@pytest.mark.chaos
def test_later_messages_of_a_refused_key_wait_and_what_is_done_again_is_written_again(
    c: custody.Custody, spark: SparkSession, bare_url: str
) -> None:
    policy = custody.Policy(ordering="key", max_attempts=3, backoff=custody.Constant("20ms"))
    with psycopg.connect(bare_url, autocommit=True) as db:
        db.execute("CREATE TABLE rows (n int CHECK (n <> 8), _offset bigint, at serial)")
        publish(c, range(21))
        pipeline = passing(Jdbc(bare_url, "rows"), policy=policy)
        pipeline.transform = lambda frame: frame.transform(
            fail_when((F.col("n") == 3) & (F.col("_attempt") == 1), "not yet")
        ).drop("name")
        summary = run(pipeline, c, spark)
        assert (summary.done, summary.dead) == (20, 1)
        rows = [n for (n,) in db.execute("SELECT n FROM rows ORDER BY at").fetchall()]
        assert sorted(rows) == sorted({*range(21)} - {8})
        assert [n for n in rows if n % 7 == 3] == [3, 10, 17]
        c.rewind("in", "g", to_offset=0)
        run(pipeline, c, spark)
        again = [n for (n,) in db.execute("SELECT n FROM rows").fetchall()]
        assert len(again) == 40, "once for each time that it was done"


@pytest.mark.chaos
def test_more_refused_rows_than_are_searched_for_do_not_end_the_pipeline(
    c: custody.Custody, spark: SparkSession, bare_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("custody.spark.outside.jdbc.REFUSED", 5)
    with psycopg.connect(bare_url, autocommit=True) as db:
        db.execute("CREATE TABLE rows (n int CHECK (n % 3 = 0))")
        publish(c, range(60))
        pipeline = passing(Jdbc(bare_url, "rows"))
        pipeline.transform = lambda frame: frame.drop("name")
        summary = run(pipeline, c, spark)
        assert (summary.done, summary.dead) == (20, 40)
        assert [n for (n,) in db.execute("SELECT n FROM rows ORDER BY n")] == [*range(0, 60, 3)]


@pytest.mark.chaos
def test_a_database_that_is_down_is_waited_for(c: custody.Custody, spark: SparkSession, bare_url: str, db: Any) -> None:
    name = psycopg.conninfo.conninfo_to_dict(bare_url)["dbname"]
    with psycopg.connect(bare_url, autocommit=True) as other:
        other.execute("CREATE TABLE rows (n int, name text)")
    publish(c, range(10))
    db.execute(f'ALTER DATABASE "{name}" WITH ALLOW_CONNECTIONS false')
    troubles: list[str] = []

    def repair(text: str) -> None:
        troubles.append(text)
        if len(troubles) == 3:
            db.execute(f'ALTER DATABASE "{name}" WITH ALLOW_CONNECTIONS true')

    summary = run(passing(Jdbc(bare_url, "rows")), c, spark, on_trouble=repair)
    assert (summary.done, summary.failed) == (10, 0)
    assert len(troubles) == 3
    assert all("not currently accepting connections" in text for text in troubles)


@pytest.mark.parametrize(
    ("table", "says"),
    [
        (None, "there is no table rows"),
        pytest.param("n int, title text", "has no column 'name'", marks=pytest.mark.chaos),
        pytest.param("n int, name text, shop int NOT NULL", "needs the column 'shop'", marks=pytest.mark.chaos),
        pytest.param("n int, name int[]", "", marks=pytest.mark.chaos),
    ],
)
def test_a_table_that_is_no_use_ends_the_pipeline_and_charges_nobody(
    c: custody.Custody, spark: SparkSession, bare_url: str, table: str | None, says: str
) -> None:
    if table is not None:
        with psycopg.connect(bare_url, autocommit=True) as db:
            db.execute(f"CREATE TABLE rows ({table})")  # type: ignore[arg-type]
    publish(c, range(4))
    if not says:
        assert run(passing(Jdbc(bare_url, "rows")), c, spark).dead == 4, "a value that is no array is wrong data"
        return
    with pytest.raises(PipelineFailed, match=says):
        run(passing(Jdbc(bare_url, "rows")), c, spark)
    stats = c.stats("in", "g")
    assert (stats.dead, stats.waiting + stats.lag) == (0, 4)


def test_a_pipeline_that_may_not_make_its_tables_says_what_to_make(bare_url: str) -> None:
    role = "shop_writer_of_test_jdbc"
    with psycopg.connect(bare_url, autocommit=True) as db:
        db.execute(f"DROP ROLE IF EXISTS {role}")
        db.execute(f"CREATE ROLE {role}")
        try:
            url = address_of(bare_url).update_query_dict({"options": f"-crole={role}"})
            table = JdbcTable(url, "rows", [])
            try:
                with pytest.raises(PipelineFailed, match="may not make its table custody_claims") as refused:
                    table.prepare()
            finally:
                table.close()
            assert "CREATE TABLE custody_staged" in str(refused.value)
        finally:
            db.execute(f"DROP ROLE {role}")


def test_a_sink_that_makes_no_sense_is_refused_and_none_shows_its_password(
    bare_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = "only-jdbc-knows-this"
    for url in (f"postgresql://me:{secret}@db/shop", f"jdbc:postgresql://db/shop?user=me&password={secret}"):
        sink = Jdbc(url, "orders")
        assert secret not in f"{sink!r} {sink.name} {Pipeline(source='in', group='g', sink=sink)!r}"
        assert sink.name == "table orders of postgresql database shop on db"
    with pytest.raises(InvalidArgument) as wrong:
        Jdbc(f"postgresql://me:{secret}@db:port/shop", "orders")
    assert secret not in str(wrong.value)
    with pytest.raises(InvalidArgument, match="An upsert needs key="):
        Jdbc(bare_url, "orders", "upsert")
    with pytest.raises(InvalidArgument, match="mode cannot be 'replace'"):
        Jdbc(bare_url, "orders", "replace")  # type: ignore[arg-type]
    twice = Pipeline(source="in", group="g", sink=[Jdbc(bare_url, "orders"), Jdbc(bare_url, "orders")])
    twice.each(lambda _: None)
    with pytest.raises(PipelineRefused, match="two sinks with one name"):
        twice.require_complete()
    monkeypatch.setattr("custody.extras.find_spec", lambda _: None)
    with pytest.raises(custody.errors.ExtraMissing, match=r"custody\[jdbc\]"):
        Jdbc(bare_url, "orders")


def test_mysql_gets_its_own_upsert() -> None:
    """There is no server of MySQL here: this is the statement that it would get."""
    from custody.spark.outside.jdbc_table import upsert

    statement = upsert("mysql", sa.table("latest", sa.column("name"), sa.column("n")), ["name"])
    said = str(statement.compile(dialect=sa.dialects.mysql.dialect()))
    assert said.endswith("ON DUPLICATE KEY UPDATE n = VALUES(n)") or "AS new ON DUPLICATE KEY UPDATE n = new.n" in said
