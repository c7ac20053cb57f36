"""The same pipelines on a standalone cluster, whose workers, master and driver are killed in the middle of a batch."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest
from tests.spark.cluster import HOSTS, Cluster
from tests.spark.drivers import Driver
from tests.spark.holding import ANOTHER
from tests.spark.verdict import Verdict, in_files, in_topic, prepare, publish, verdict
from tests.waiting import wait_for

import custody
from custody.spark.outside.cached_rows import LOST

pytestmark = [pytest.mark.req("S4", "S5"), pytest.mark.chaos, pytest.mark.timeout(600)]

SPECULATION = {
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    "spark.speculation.multiplier": "1.1",
    "spark.speculation.quantile": "0.1",
    "spark.speculation.minTaskRuntime": "200ms",
}
FIRST, SECOND = HOSTS


class Crew:
    """The driver on the cluster: one at a time, for it has all cores."""

    def __init__(self, made: Cluster) -> None:
        self._cluster = made
        self._count = 0
        self._driver: Driver | None = None
        self._settings: dict[str, str] = {}

    def driver(self, **settings: str) -> Driver:
        """The one that lives, if it has these settings; else a new one."""
        if self._driver is not None and self._driver.process.poll() is None and self._settings == settings:
            return self._driver
        self.close()
        self._cluster.be_ready()
        self._count += 1
        self._settings = settings
        self._driver = Driver(
            self._cluster.place / f"driver-{self._count}",
            {"spark.master": self._cluster.url, **settings},
            self._cluster.environment(),
        )
        return self._driver

    def close(self) -> None:
        if self._driver is not None:
            self._driver.kill()


@pytest.fixture(scope="module")
def crew(spark_cluster: Cluster) -> Iterator[Crew]:
    made = Crew(spark_cluster)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def live(database_url: str) -> Iterator[custody.Custody]:
    """Custody with the real clock, with the topics and the group."""
    with custody.connect(database_url) as opened:
        prepare(opened)
        yield opened


@pytest.fixture
def marks(tmp_path: Path) -> Path:
    place = tmp_path / "marks"
    place.mkdir()
    return place


def settled(c: custody.Custody, messages: int, *, stages: int = 0) -> Verdict:
    """Everything is done or dead and published once. A killed driver leaves at most the stage of its last batch."""
    found = verdict(c)
    assert (found.published, found.open) == (messages, 0)
    assert found.stages <= stages
    return found


def is_held(marks: Path, host: str, driver: Driver) -> None:
    """Waits until a task on the host has staged its outputs, and is held before it says so."""
    wait_for((marks / f"held {host}").exists, driver.story, 90)


def test_a_worker_killed_in_the_middle_of_a_batch(
    spark_cluster: Cluster, crew: Crew, live: custody.Custody, marks: Path
) -> None:
    publish(live, 0, 2000)
    driver = crew.driver()
    driver.run(live.database_url, hold={"marks": str(marks), "host": SECOND, "until": "go"}, more=True)
    is_held(marks, SECOND, driver)
    assert spark_cluster.python_workers(SECOND), "a task runs there"
    spark_cluster.kill_worker(SECOND)
    end = driver.has_run()
    assert (end["code"], end["summary"]["restarts"]) == (None, 0), driver.story()
    assert len(list(marks.glob("staged *.1 on *"))) == 1, "what it had staged was staged again elsewhere"
    settled(live, 2000)


@pytest.mark.slow
@pytest.mark.parametrize("style", ["each", "frame"])
def test_rows_for_files_that_a_lost_worker_had_are_made_again_with_their_batch(
    spark_cluster: Cluster, crew: Crew, live: custody.Custody, db: psycopg.Connection, tmp_path: Path, style: str
) -> None:
    """What its executor kept is gone when it is to be written; what Spark makes of it anew is not trusted."""
    publish(live, 0, 2000)
    driver = crew.driver()
    spark_cluster.has_workers()
    driver.run(live.database_url, ("staged", 1, "wait"), style=style, files=tmp_path / "table", more=True)
    driver.reaches("staged")
    spark_cluster.kill_worker(SECOND)
    driver.go_on()
    end = driver.has_run()
    assert (end["code"], end["summary"]["restarts"]) == (None, 0), driver.story()
    assert any(LOST in one.get("trouble", "") for one in driver.said)
    settled(live, 2000)
    assert in_files(tmp_path / "table") == in_topic(db)


@pytest.mark.slow
def test_the_master_killed_and_started_again_in_the_middle_of_a_batch(
    spark_cluster: Cluster, crew: Crew, live: custody.Custody, marks: Path
) -> None:
    """And it knows its workers and the application: it gives that a new executor for one that dies afterwards."""
    publish(live, 0, 2000)
    driver = crew.driver()
    spark_cluster.has_workers()
    driver.run(live.database_url, style="frame", hold={"marks": str(marks), "host": SECOND, "until": "go"}, more=True)
    is_held(marks, SECOND, driver)
    spark_cluster.kill_master()
    spark_cluster.start_master()
    spark_cluster.has_workers()
    spark_cluster.kill_worker(SECOND)
    spark_cluster.start_worker(SECOND)
    (marks / "go").touch()
    end = driver.has_run()
    assert end["code"] is None, driver.story()
    settled(live, 2000)
    publish(live, 2000, 200)
    driver.run(live.database_url, style="frame", more=True)
    assert driver.has_run()["summary"]["done"] == 200
    (application,) = spark_cluster.state()["activeapps"]
    assert application["cores"] == 2, "both workers have an executor again"
    settled(live, 2200)


@pytest.mark.slow
def test_the_driver_killed_in_the_middle_of_a_batch(
    spark_cluster: Cluster, crew: Crew, live: custody.Custody, db: psycopg.Connection, marks: Path
) -> None:
    publish(live, 0, 2000)
    driver = crew.driver()
    driver.run(live.database_url, hold={"marks": str(marks), "host": None, "until": "go"}, more=True)
    is_held(marks, SECOND, driver)
    driver.kill()
    newer = crew.driver(**SPECULATION)
    newer.run(live.database_url, more=True)
    assert newer.has_run()["code"] is None, newer.story()
    settled(live, 2000, stages=1)


@pytest.mark.slow
@pytest.mark.parametrize("style", ["each", "frame"])
def test_both_attempts_of_a_task_stage_and_one_is_published(
    spark_cluster: Cluster, crew: Crew, live: custody.Custody, marks: Path, style: str
) -> None:
    publish(live, 0, 2000)
    driver = crew.driver(**SPECULATION)
    hold = {"marks": str(marks), "host": SECOND, "until": ANOTHER}
    driver.run(live.database_url, style=style, hold=hold, max_per_batch=500, more=True)
    end = driver.has_run()
    assert end["code"] is None, driver.story()
    assert (marks / ANOTHER).exists(), f"no task staged twice: {list(marks.iterdir())}"
    settled(live, 2000)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_whoever_is_killed_at_whatever_moment(
    spark_cluster: Cluster, crew: Crew, live: custody.Custody, db: psycopg.Connection, tmp_path: Path
) -> None:
    """Six rounds; a pipeline without an end, so that each kill meets it at work."""
    chance, table = random.Random(4), tmp_path / "table"
    messages, kills = 0, 0
    for number in range(6):
        victim = ("worker", "driver", "master")[number % 3]
        publish(live, messages, 4000)
        messages += 4000
        driver = crew.driver(**(SPECULATION if number % 2 else {}))
        before = len(driver.committed())
        style = chance.choice(["each", "frame"])
        driver.run(live.database_url, style=style, files=table, max_per_batch=400, more=True)
        wait_for(lambda: len(driver.committed()) > before, driver.story, 90)  # noqa: B023
        wait_for(_after(chance.uniform(0, 1.5)), "time passes")
        if victim == "driver":
            driver.kill()
            kills += 1
            continue
        if victim == "master":
            spark_cluster.kill_master()
            spark_cluster.start_master()
        else:
            host = chance.choice(HOSTS)
            spark_cluster.kill_worker(host)
            spark_cluster.start_worker(host)
        assert driver.has_run(240)["code"] is None, driver.story()
        settled(live, messages, stages=kills)
        assert in_files(table) == in_topic(db)


def _after(seconds: float) -> Callable[[], bool]:
    """A condition that comes true by itself: the moment of a kill is by chance."""
    until = time.monotonic() + seconds
    return lambda: time.monotonic() > until
