"""What operators see of a pipeline: its state, since when, tries and last error, and whether its driver lives."""

from __future__ import annotations

from datetime import timedelta

import psycopg
import pytest
from tests.conftest import Clock

import custody
from custody.errors import PipelineFenced
from custody.verbs.pipelines import PipelineState

pytestmark = [pytest.mark.core, pytest.mark.req("S6")]


@pytest.fixture
def source(c: custody.Custody) -> custody.Custody:
    c.create_topic("in", partitions=2)
    c.create_group("in", "g")
    return c


def seen(c: custody.Custody) -> PipelineState:
    (state,) = c.pipelines("in", "g")
    return state


def test_a_group_without_a_pipeline_is_none(source: custody.Custody) -> None:
    assert source.pipelines() == []


def test_failures_are_counted_with_their_error_until_it_runs_again(source: custody.Custody, clock: Clock) -> None:
    drive, _ = source.drive("in", "g")
    began = clock()
    assert (seen(source).state, seen(source).since, seen(source).tries) == ("running", began, 0)
    clock.move(3)
    drive.report("retrying", tries=2, error="no disk")
    clock.move(1)
    drive.report("retrying", tries=2, error="no disk")
    state = seen(source)
    assert (state.state, state.tries, state.last_error) == ("retrying", 2, "no disk")
    assert (state.since, state.error_at) == (began + timedelta(seconds=3),) * 2, "what is said again is not new"
    assert (state.for_seconds, state.seen_seconds) == (1.0, 0.0)
    drive.report("retrying", tries=3, error="no disk")
    assert seen(source).error_at == began + timedelta(seconds=4)
    drive.report("running", tries=0)
    state = seen(source)
    assert (state.state, state.tries, state.last_error) == ("running", 0, "no disk"), "the last error is not forgotten"


def test_a_driver_that_is_not_heard_of_is_gone(source: custody.Custody, clock: Clock, db: psycopg.Connection) -> None:
    drive, _ = source.drive("in", "g")
    clock.move(15)
    drive.report()
    last = clock()
    clock.move(15)
    assert seen(source).state == "running"
    clock.move(6)
    state = seen(source)
    assert (state.state, state.since, state.seen_seconds) == ("gone", last, 21.0)
    query = "SELECT state FROM custody.pipeline_state WHERE topic = 'in' AND consumer_group = 'g'"
    assert db.execute(query).fetchone() is not None
    drive.report()
    assert seen(source).state == "running"


@pytest.mark.parametrize("ended", ["stopped", "failed"])
def test_one_that_has_ended_stays_as_it_ended(source: custody.Custody, clock: Clock, ended: str) -> None:
    drive, _ = source.drive("in", "g")
    drive.report(ended, error="it broke" if ended == "failed" else None)  # type: ignore[arg-type]
    clock.move(3600)
    state = seen(source)
    assert (state.state, state.for_seconds) == (ended, 3600.0)
    source.drive("in", "g")
    assert (seen(source).state, seen(source).for_seconds) == ("running", 0.0)


def test_an_older_driver_says_nothing_any_more(source: custody.Custody) -> None:
    older, _ = source.drive("in", "g")
    older.report("retrying", tries=4, error="no disk")
    newer, _ = source.drive("in", "g")
    with pytest.raises(PipelineFenced):
        older.report("failed", error="too late")
    assert (seen(source).state, seen(source).tries, seen(source).epoch) == ("running", 0, newer.driver.epoch)


def test_a_driver_that_starts_again_is_still_retrying(source: custody.Custody) -> None:
    drive, _ = source.drive("in", "g")
    drive.report("retrying", tries=4, error="no disk")
    source.drive("in", "g", after=drive.driver.epoch)
    assert (seen(source).state, seen(source).tries) == ("retrying", 4)
