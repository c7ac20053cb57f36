"""In and out at once for a long time: the consumers keep up, the disk is bounded, and nothing is lost. Which rate a
machine reaches is a figure of `make bench` (`sustained`), not of a test.

`CUSTODY_SUSTAINED_SECONDS` and `CUSTODY_SUSTAINED_RATE` (messages a second) change the long run.
"""

from __future__ import annotations

import os

import pytest
from bench.flow import GROUP, TOPIC, Flow, run

import custody

SECONDS = float(os.environ.get("CUSTODY_SUSTAINED_SECONDS", "1500"))
RATE = int(os.environ.get("CUSTODY_SUSTAINED_RATE", "20000"))


def check(url: str, flow: Flow) -> None:
    course = run(url, flow)
    print(course.report())
    assert course.published == course.consumed
    assert course.slope <= course.slack, course.report()
    assert course.upkeep["dropped"] > 0, course.report()
    assert max(sample.log for sample in course.samples) < 2 * flow.keep, course.report()
    assert max(sample.journal for sample in course.samples) < 2 * flow.journal, course.report()
    with custody.connect(url) as c:
        assert sum(c.topic(TOPIC).tails) == course.published
        stats = c.stats(TOPIC, GROUP)
        assert (stats.depth, stats.dead) == (0, 0)


@pytest.mark.req("V7", "V13")
@pytest.mark.own_database
def test_consumers_keep_up_for_some_seconds(database_url: str) -> None:
    check(database_url, Flow(seconds=8, rate=4_000, keep=2**23, journal=2**23))


@pytest.mark.long
@pytest.mark.timeout(SECONDS + 300)
@pytest.mark.req("V7", "V13")
@pytest.mark.own_database
def test_consumers_keep_up_for_minutes(database_url: str) -> None:
    check(database_url, Flow(seconds=SECONDS, rate=RATE, keep=2**28, journal=2**25))
