"""In and out at once for minutes, 1 kB, with retention: the rates, the backlog, the disk."""

from __future__ import annotations

from collections.abc import Iterator

from bench.flow import Flow, run
from bench.report import Row, at_least, at_most
from bench.stage import Stage

REACHED = 0.99
"""Of the rate that is offered: what is measured lags by a batch."""


def rows(stage: Stage) -> Iterator[Row]:
    sizes = stage.sizes
    flow = Flow(seconds=sizes.sustained_seconds, rate=sizes.sustained_rate, keep=sizes.sustained_keep)
    with stage.database() as url:
        course = run(url, flow)
    assert course.consumed == course.published, course.report()
    span = f"{flow.seconds:g} s, {flow.bytes:,} bytes, {flow.rate:,} offered a second"
    yield Row(
        what=f"in, while consuming, {span}",
        measured=course.rate_in,
        unit="msg/s",
        target=at_least(REACHED * flow.rate),
    )
    yield Row(
        what=f"out, while producing, {span}",
        measured=course.rate_out,
        unit="msg/s",
        target=at_least(REACHED * flow.rate),
    )
    yield Row(
        what=f"growth of the backlog, {span}",
        measured=course.slope,
        unit="msg/s",
        target=at_most(course.slack),
        note=f"at most {max(sample.backlog for sample in course.steady):,} messages; the target is a second's in all",
    )
    yield Row(
        what=f"the log on disk, at most, {span}",
        measured=max(sample.log for sample in course.samples) / 2**20,
        unit="MB",
        target=at_most(2 * flow.keep / 2**20),
        note=f"retention keeps {flow.keep / 2**20:,.0f} MB",
    )
