"""Drivers of a keyed pipeline that are really killed: the state of each key is the sum of its done messages."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from tests.spark.drivers import Drivers
from tests.spark.verdict import assert_states_are_sums, prepare, publish, verdict

import custody

pytestmark = [pytest.mark.req("X8", "S4"), pytest.mark.chaos, pytest.mark.timeout(600)]

MESSAGES = 3000


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


def test_killed_at_the_steps_of_a_commit(live: custody.Custody, drivers: Drivers) -> None:
    publish(live, 0, MESSAGES)
    for step, batch in (("staged", 1), ("uncommitted", 2), ("committed", 1), ("returned", 1)):
        driver = drivers.take()
        driver.run(live.database_url, (step, batch, "kill"), style="keyed", max_per_batch=300)
        driver.dies()
        assert_states_are_sums(live)
    driver = drivers.take(more=False)
    driver.run(live.database_url, style="keyed", max_per_batch=500)
    driver.finishes()
    found = verdict(live)
    assert found.open == 0
    assert assert_states_are_sums(live) == MESSAGES - len(found.dead)


def test_killed_at_any_moment(live: custody.Custody, drivers: Drivers) -> None:
    luck = random.Random(8)
    publish(live, 0, MESSAGES)
    for _ in range(3):
        driver = drivers.take()
        driver.run(live.database_url, style="keyed", max_per_batch=200)
        driver.is_killed_after(luck.uniform(1, 6))
        assert_states_are_sums(live)
    driver = drivers.take(more=False)
    driver.run(live.database_url, style="keyed", max_per_batch=500)
    driver.finishes()
    found = verdict(live)
    assert found.open == 0
    assert assert_states_are_sums(live) == MESSAGES - len(found.dead)
