"""Delta and Iceberg tables: each done message is in them once, and a row that a table would refuse dies alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyiceberg.catalog import load_catalog
from pyspark.sql import DataFrame, SparkSession

import custody
from custody.errors import ExtraMissing, InvalidArgument, PipelineFailed
from custody.spark import Delta, Files, Iceberg, Jdbc, Pipeline, PipelineSummary, Write
from custody.spark.outside.lake import Chunks, Lake
from custody.verbs.pipelines import DriverVerbs

pytestmark = [pytest.mark.req("X9", "S5"), pytest.mark.timeout(300)]
ONCE = custody.Policy(ordering="key", max_attempts=1)
ROW = "n int, name string"


@pytest.fixture
def c(database_url: str) -> Iterator[custody.Custody]:
    """Custody with the server's own clock: Spark's processes know no other."""
    with custody.connect(database_url, worker="test") as opened:
        opened.create_topic("in", partitions=2)
        opened.create_topic("out", partitions=2)
        yield opened


class Place:
    """A table of one of both formats, as another program has it."""

    def __init__(self, kind: str, home: Path) -> None:
        self.kind, self._home = kind, home
        self._catalog = {
            "name": "test",
            "type": "sql",
            "uri": f"sqlite:///{home}/catalog.db",
            "warehouse": home.as_uri(),
        }

    def sink(self) -> Lake:
        if self.kind == "delta":
            return Delta(f"{self._home}/rows")
        return Iceberg("shop.rows", warehouse=str(self._home), catalog=self._catalog)

    def create(self, schema: pa.Schema) -> None:
        if self.kind == "delta":
            DeltaTable.create(f"{self._home}/rows", schema)
        else:
            with load_catalog(**self._catalog) as catalog:
                catalog.create_namespace("shop")
                catalog.create_table("shop.rows", schema=schema)

    def rows(self) -> pa.Table:
        if self.kind == "delta":
            return pa.table(DeltaTable(f"{self._home}/rows").to_pyarrow_dataset().to_table())
        with load_catalog(**self._catalog) as catalog:
            return catalog.load_table("shop.rows").scan().to_arrow()

    def numbers(self) -> list[int]:
        return sorted(self.rows()["n"].to_pylist())

    def commits(self) -> int:
        if self.kind == "delta":
            return DeltaTable(f"{self._home}/rows").version()
        with load_catalog(**self._catalog) as catalog:
            return len(catalog.load_table("shop.rows").snapshots())

    def staged(self) -> list[Path]:
        return [path for path in self._home.rglob("_custody/**/*.parquet") if path.is_file()]


@pytest.fixture(params=["delta", "iceberg"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    home = tmp_path / "lake"
    home.mkdir()
    return Place(request.param, home)


def publish(c: custody.Custody, numbers: range) -> None:
    c.publish_many("in", [custody.Outgoing({"n": n, "name": f"name {n}"}, key=f"k{n % 7}") for n in numbers])


def run(pipeline: Pipeline, c: custody.Custody, spark: SparkSession, **settings: Any) -> PipelineSummary:
    return pipeline.run(c, spark=spark, **({"drain": "30s", "batch_time": "10m"} | settings))


def passing(*given: Any) -> Pipeline:
    pipeline = Pipeline(source="in", group="g", sink=["out", *given], policy=ONCE, schema=ROW)
    pipeline.frame(lambda frame: frame.select("_partition", "_offset", "_key", "n", "name"))
    return pipeline


def published(c: custody.Custody) -> list[int]:
    return sorted(m.payload["n"] for p in range(2) for m in c.read("out", p, max_messages=1000))


CRASHES = [(DriverVerbs, "commit", True), (DriverVerbs, "commit", False), (Lake, "show", True), (Lake, "show", False)]
"""Before the commit in Custody, after it, before the commit of the table, and after that."""


@pytest.mark.parametrize(
    ("place", "crashes"),
    [
        ("delta", CRASHES[1:2]),
        pytest.param("delta", CRASHES, marks=pytest.mark.chaos),
        pytest.param("iceberg", CRASHES, marks=pytest.mark.chaos),
    ],
    indirect=["place"],
)
def test_a_new_table_has_each_done_message_once_after_crashes_around_the_commit(
    c: custody.Custody,
    spark: SparkSession,
    place: Place,
    monkeypatch: pytest.MonkeyPatch,
    crashes: list[tuple[type, str, bool]],
) -> None:
    left, batches = list(crashes), len(crashes) + 1
    for owner, name in ((DriverVerbs, "commit"), (Lake, "show")):
        monkeypatch.setattr(owner, name, crashing(getattr(owner, name), owner, name, left))
    publish(c, range(10 * batches))
    pipeline = passing(place.sink())
    assert run(pipeline, c, spark, max_per_batch=10).failed == 0
    assert left == []
    assert place.numbers() == published(c) == [*range(10 * batches)]
    assert place.rows().column_names == ["_partition", "_offset", "_key", "n", "name"]
    assert place.commits() == batches
    assert place.staged() == []


def crashing(real: Any, owner: type, name: str, left: list[tuple[type, str, bool]]) -> Any:
    """Fails each time that its turn has come, before or after its deed. Nothing is cleared away."""

    def call(*arguments: Any, **named: Any) -> Any:
        if left[:1] == [(owner, name, True)]:
            left.pop(0)
            raise OSError("crashed")
        found = real(*arguments, **named)
        if left[:1] == [(owner, name, False)]:
            left.pop(0)
            raise OSError("crashed")
        return found

    return call


@pytest.mark.chaos
def test_rows_that_a_table_would_refuse_die_alone(c: custody.Custody, spark: SparkSession, place: Place) -> None:
    place.create(pa.schema([pa.field("n", pa.int32(), False), ("name", pa.int64())]))
    if place.kind == "delta":
        DeltaTable(f"{place._home}/rows").alter.add_constraint({"small": "n < 20"})
    publish(c, range(24))
    pipeline = passing(place.sink())
    pipeline.transform = lambda frame: frame.selectExpr(
        "_partition", "_offset", "_key", "nullif(n, 3) AS n", "if(n = 9, 'x', cast(n AS string)) AS name"
    )
    summary = run(pipeline, c, spark)
    reasons = {letter.payload["n"]: letter.last_error or "" for letter in c.dead("in", "g")}
    assert "n is null" in reasons.pop(3)
    assert "x in name is no bigint" in reasons.pop(9)
    late = range(20, 24) if place.kind == "delta" else range(0)
    assert set(reasons) == {*late}
    assert all("small (n < 20) is violated" in reason for reason in reasons.values())
    good = sorted({*range(24)} - {3, 9, *late})
    assert (summary.done, summary.restarts) == (len(good), 0)
    assert place.numbers() == good
    assert place.rows()["name"].to_pylist() == place.rows()["n"].to_pylist()


@pytest.mark.chaos
def test_a_table_that_does_not_fit_ends_the_pipeline_and_charges_nobody(
    c: custody.Custody, spark: SparkSession, place: Place
) -> None:
    place.create(pa.schema([("n", pa.int32()), ("title", pa.string())]))
    publish(c, range(4))
    with pytest.raises(PipelineFailed, match="has no column 'name'; it has: n, title"):
        run(passing(place.sink()), c, spark)
    stats = c.stats("in", "g")
    assert (stats.dead, stats.waiting + stats.lag, place.numbers()) == (0, 4, [])


@pytest.mark.chaos
def test_a_claim_that_another_driver_appends_meanwhile_is_not_appended_again(
    c: custody.Custody, spark: SparkSession, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one has read the same table, and is faster."""
    sink = place.sink()
    publish(c, range(10))
    tables, first = Chunks.tables, [True]

    def slow(self: Any, schema: pa.Schema) -> Iterator[pa.Table]:
        found = [*tables(self, schema)]
        if first:
            first.clear()
            place.sink().append(seen[-1], type(self)(spark, self.files))
        yield from found

    seen: list[Write] = []
    real = Lake.show
    monkeypatch.setattr(Lake, "show", lambda self, spark, write: (seen.append(write), real(self, spark, write))[1])
    monkeypatch.setattr("custody.spark.outside.lake.Chunks.tables", slow)
    troubles: list[str] = []
    run(passing(sink), c, spark, on_trouble=troubles.append)
    assert place.numbers() == [*range(10)]
    assert place.commits() == 1
    assert len(troubles) == 1


@pytest.mark.chaos
def test_all_kinds_of_sinks_together_have_each_done_message_once(
    c: custody.Custody, spark: SparkSession, database_url: str, db: psycopg.Connection, bare_url: str, tmp_path: Path
) -> None:
    """With a table in Iceberg's default catalogue, which is in Custody's database."""
    delta, iceberg = Place("delta", tmp_path), Iceberg("shop.rows", warehouse=str(tmp_path / "warehouse"))
    with psycopg.connect(bare_url, autocommit=True) as shop:
        shop.execute("CREATE TABLE rows (n int CHECK (n <> 11), name text)")
        publish(c, range(40))
        pipeline = passing(delta.sink(), Jdbc(bare_url, "rows"), iceberg, Files(tmp_path / "files"))
        failed: list[int] = []

        @pipeline.write
        def fails_once(_rows: DataFrame, write: Write) -> None:
            if not failed:
                failed.append(write.claim)
                raise OSError("the disk is full")

        summary = run(pipeline, c, spark, max_per_batch=15)
        good = sorted({*range(40)} - {11})
        assert (summary.done, summary.dead) == (39, 1)
        assert [n for (n,) in shop.execute("SELECT n FROM rows ORDER BY n")] == good
    files = sorted(row["n"] for row in spark.read.parquet(str(tmp_path / "files")).collect())
    assert published(c) == delta.numbers() == files == good
    with iceberg.catalog(database_url) as catalog:
        table = catalog.load_table("shop.rows")
        assert sorted(table.scan().to_arrow()["n"].to_pylist()) == good
        claims = [int((snapshot.summary or {}).get("custody.claim") or 0) for snapshot in table.snapshots()]
        assert claims == sorted({*claims})
        assert claims[0] > 0
    assert db.execute("SELECT count(*) FROM custody_iceberg.iceberg_tables").fetchone() == (1,)


@pytest.mark.chaos
def test_partitions_and_types_of_a_handlers_schema(c: custody.Custody, spark: SparkSession, tmp_path: Path) -> None:
    schema = "day date, at timestamp, price decimal(10,2), tags array<string>, more struct<a: int>, raw binary"
    delta = Delta(str(tmp_path / "rows"), partition_by=["day"], schema=schema)
    iceberg = Iceberg("shop.rows", warehouse=str(tmp_path), schema=schema)
    publish(c, range(3))
    pipeline = Pipeline(source="in", group="g", sink=[delta, iceberg], policy=ONCE)

    @pipeline.each
    def typed(message: custody.Message) -> dict[str, Any]:
        n = message.payload["n"]
        day = f"2026-01-0{n + 1}"
        return {"day": day, "at": f"{day}T10:00:00Z", "price": 1.5, "tags": ["x"], "more": {"a": n}, "raw": "YQ=="}

    assert run(pipeline, c, spark).done == 3
    found = DeltaTable(str(tmp_path / "rows"))
    assert found.metadata().partition_columns == ["day"]
    rows = pa.table(found.to_pyarrow_dataset().to_table()).sort_by("day")
    with iceberg.catalog() as catalog:
        also = catalog.load_table("shop.rows").scan().to_arrow().sort_by("day")
    for one in (rows, also):
        assert [str(at) for at in one["at"].to_pylist()] == [f"2026-01-0{n} 10:00:00+00:00" for n in (1, 2, 3)]
        assert [str(price) for price in one["price"].to_pylist()] == ["1.50"] * 3
        assert one["more"].to_pylist() == [{"a": 0}, {"a": 1}, {"a": 2}]


def test_sinks_that_make_no_sense_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="partition_by cannot be 'day'"):
        Delta(str(tmp_path), partition_by="day")
    with pytest.raises(InvalidArgument, match="Give its namespace and name"):
        Iceberg("rows", warehouse=str(tmp_path))
    monkeypatch.setattr("custody.extras.find_spec", lambda _: None)
    with pytest.raises(ExtraMissing, match=r"custody\[delta\]"):
        Delta(str(tmp_path))
    with pytest.raises(ExtraMissing, match=r"custody\[iceberg\]"):
        Iceberg("shop.rows", warehouse=str(tmp_path))
