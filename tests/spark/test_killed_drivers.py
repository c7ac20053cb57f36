"""Drivers that are killed, replaced, held up, or lose their database: one set of outputs for each done message."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from tests.spark.drivers import Driver, Drivers
from tests.spark.verdict import GROUP, SOURCE, prepare, publish, verdict
from tests.waiting import wait_for

import custody
from custody.store import embedded

pytestmark = [pytest.mark.req("S4"), pytest.mark.chaos, pytest.mark.timeout(600)]

STEPS = [
    "claimed",
    "logged",
    "staged",
    "uncommitted",
    "committed",
    "returned",
    "staged python",
    "staged java",
]
"""Where a driver can die in a batch, whole or only its Python or its JVM. Claimed: its source has a claim, and Spark's
own log may or may not have it yet. Uncommitted: all is done but the COMMIT. Committed: Spark knows nothing of it yet.
"""


@pytest.fixture(scope="module")
def drivers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Drivers]:
    started = Drivers(tmp_path_factory.mktemp("drivers"))
    try:
        yield started
    finally:
        started.close()


@pytest.fixture
def live(database_url: str) -> Iterator[custody.Custody]:
    """Custody with the real clock, with the topics and the group."""
    with custody.connect(database_url) as opened:
        prepare(opened)
        yield opened


def one(db: psycopg.Connection[Any], query: str) -> Any:
    row = db.execute(query).fetchone()
    return None if row is None else row[0]


def last_claim(db: psycopg.Connection[Any]) -> int:
    return one(db, "SELECT last_claim FROM custody.pipelines") or 0


def kill_at(driver: Driver, step: str, batch: int, c: custody.Custody, db: psycopg.Connection[Any], **how: Any) -> None:
    """Runs the driver until it dies at this step of its n-th batch; of half of it if the step says so."""
    step, _, victim = step.partition(" ")
    if step != "claimed":
        driver.run(c.database_url, (step, batch, f"kill {victim}".strip()), **how)
        driver.dies()
    else:
        # seen from outside, since the claim is made in the process of the source, which Spark starts
        seen = last_claim(db) + batch
        driver.run(c.database_url, **how)
        wait_for(lambda: last_claim(db) >= seen, driver.story, timeout=60)
        driver.kill()
    settled(db)


def settled(db: psycopg.Connection[Any]) -> None:
    """Waits until the server has noticed that its clients are gone: until then one may still be at work for them."""
    busy = (
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        " AND state <> 'idle'"
    )
    wait_for(lambda: one(db, busy) == 0, "the server still works for somebody")


def checked(c: custody.Custody, *, kills: int) -> None:
    """Everything is done or dead, and published once. A killed driver leaves at most the stage of its last batch."""
    found = verdict(c)
    assert found.open == 0
    assert found.dead
    assert len(found.done) > 0.9 * found.published
    assert found.stages <= kills


@pytest.mark.parametrize(
    "steps",
    [
        # a step in capital letters: the checkpoint is deleted after it
        ["UNCOMMITTED", "committed"],
        pytest.param(STEPS, marks=pytest.mark.long, id="kept"),
        pytest.param([step.upper() for step in STEPS], marks=pytest.mark.long, id="deleted"),
    ],
)
def test_a_driver_killed_at_any_step_is_replaced(
    live: custody.Custody, db: psycopg.Connection, drivers: Drivers, tmp_path: Path, steps: list[str]
) -> None:
    checkpoint = tmp_path / "checkpoint"
    for number, step in enumerate(steps):
        publish(live, 1000 * number, 1000)
        kill_at(drivers.take(), step.lower(), 1 + number % 2, live, db, checkpoint=checkpoint, max_per_batch=400)
        verdict(live)
        if step.isupper():
            shutil.rmtree(checkpoint, ignore_errors=True)
    last = drivers.take()
    last.run(live.database_url, checkpoint=checkpoint)
    last.finishes()
    checked(live, kills=len(steps))


@pytest.mark.req("X8")
@pytest.mark.chaos
def test_a_driver_of_a_batch_handler_is_replaced(
    live: custody.Custody, db: psycopg.Connection, drivers: Drivers, tmp_path: Path
) -> None:
    for number, step in enumerate(("staged", "committed")):
        publish(live, 1000 * number, 1000)
        kill_at(drivers.take(), step, 1 + number, live, db, max_per_batch=400, style="batch")
        verdict(live)
    last = drivers.take()
    last.run(live.database_url, style="batch", files=tmp_path / "table")
    last.finishes()
    checked(live, kills=2)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(2))
def test_drivers_killed_at_random_moments_are_replaced(
    live: custody.Custody, db: psycopg.Connection, drivers: Drivers, seed: int
) -> None:
    kills, moments = 10, random.Random(seed)
    for number in range(kills):
        publish(live, 1500 * number, 1500)
        driver = drivers.take()
        driver.run(live.database_url, drain=None, max_per_batch=300)
        driver.is_killed_after(moments.uniform(0, 10))
        settled(db)
        verdict(live)
    last = drivers.take()
    last.run(live.database_url)
    last.finishes()
    checked(live, kills=kills)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A server of the test's own, with every write flushed."""
    place = tmp_path / "custody"
    with embedded.acquire(place):
        yield place


def test_a_driver_outlives_a_crash_of_the_database(home: Path, drivers: Drivers) -> None:
    with custody.connect(home=home) as c:
        prepare(c)
        publish(c, 0, 3000)
        driver = drivers.take()
        driver.run(c.database_url, ("staged", 1, "wait"), ("logged", 2, "wait"), ("committed", 3, "wait"))
        # what is staged is gone when the commit looks for it
        driver.reaches("staged")
        embedded.stop(home, mode="immediate")
        embedded.acquire(home).close()
        driver.go_on()
        # down while the batch is run: it is run again until the database is back
        driver.reaches("logged")
        embedded.stop(home, mode="immediate")
        driver.go_on()
        before = driver.troubles()
        wait_for(lambda: driver.troubles() > before + 1, driver.story, timeout=60)
        embedded.acquire(home).close()
        # a crash right after a commit takes nothing back
        driver.reaches("committed")
        embedded.stop(home, mode="immediate")
        embedded.acquire(home).close()
        driver.go_on()
        summary = driver.finishes()
        assert summary["done"] + summary["dead"] == 3000, "the same driver did it all"
    with custody.connect(home=home) as c:
        checked(c, kills=1)


@pytest.mark.long
def test_drivers_that_start_over_one_another_agree(live: custody.Custody, drivers: Drivers) -> None:
    publish(live, 0, 6000)
    running: list[Driver] = []
    for number in range(4):
        driver = drivers.take()
        driver.run(live.database_url, drain=None if number < 3 else "60s", max_per_batch=200)
        running.append(driver)
        if number < 3:
            wait_for(driver.committed, driver.story, timeout=60)
    ends = [driver.ends() for driver in running]
    assert [end["code"] for end in ends] == ["pipeline_fenced"] * 3 + [None]
    claims = [claim for driver in running for claim in driver.committed()]
    assert len(claims) == len(set(claims))
    checked(live, kills=4)


def test_a_lost_lease_publishes_nothing(live: custody.Custody, db: psycopg.Connection, drivers: Drivers) -> None:
    publish(live, 0, 4000)
    driver = drivers.take(more=False)
    driver.run(live.database_url, ("staged", 2, "wait"), ("staged", 3, "wait"))
    driver.reaches("staged")
    # held up until its leases are over, and somebody else has had some of its messages
    driver.stop()
    expired = "SELECT count(*) FROM custody.leases WHERE deadline <= clock_timestamp()"
    wait_for(lambda: one(db, expired), "the leases do not expire")
    taken = live.claim(SOURCE, GROUP, max_messages=50)
    assert taken
    driver.resume()
    driver.go_on()
    driver.reaches("staged")
    assert driver.lost() > 0
    taken.release()
    # and a rewind takes the batch away from it: what was done in that partition is done once more
    live.rewind(SOURCE, GROUP, to_offset=0, partition=0)
    driver.go_on()
    driver.finishes()
    found = verdict(live)
    assert found.open == 0
    assert found.lost > 0
    # more than that if some of the partition were done before: the verdict counts them for each life
    assert found.outputs >= 2 * len(found.done)
    assert found.stages <= 2
