"""The figures of the database for /metrics. Scrapes share one query at a time, which may fail and has a time limit."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import get_args

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from custody.errors import CustodyError
from custody.model.insights import GroupFigures, TopicFigures
from custody.outbox.events import Figures as OutboxFigures
from custody.verbs.pipelines import PipelineState, RunState

logger = logging.getLogger(__name__)

KEEP = 1.0
"""Seconds for which the figures are cached."""
LIMIT = 5.0
"""Timeout of the query in seconds."""
OTHER = "(other)"
"""The label of all topics and groups beyond the limit of series. No topic and no group can have this name."""
BREAKER = ("closed", "open", "probing")

_GROUPS = {
    "lag": "Messages that were never delivered; for a group with bindings, those that it has not scanned yet.",
    "waiting": "Messages that wait for a retry.",
    "in_flight": "Messages under a lease.",
    "holes": "Gaps among the resolved offsets.",
    "parked": "Messages behind an earlier one of their key.",
    "dead": "Dead letters.",
    "depth": "Messages that are not resolved; for a group with bindings, including those that it has not scanned yet.",
}


@dataclass(frozen=True, kw_only=True)
class Overview:
    """The figures of one query."""

    topics: list[TopicFigures]
    groups: list[GroupFigures]
    outbox: list[OutboxFigures]
    pipelines: list[PipelineState]


class DatabaseMetrics:
    """Caches the figures for a second, and queries the database once at a time. Used in one event loop."""

    def __init__(self, look: Callable[[], Awaitable[Overview]]) -> None:
        self._look = look
        self._last: asyncio.Future[Overview] | None = None
        self._until = 0.0

    async def overview(self) -> Overview | None:
        """The figures, or None if the database does not answer in time."""
        loop = asyncio.get_running_loop()
        if self._last is None or (self._last.done() and loop.time() >= self._until):
            self._last = asyncio.ensure_future(self._query())
            self._last.add_done_callback(_retrieve)
        try:
            async with asyncio.timeout(LIMIT):
                return await asyncio.shield(self._last)
        except TimeoutError:
            logger.warning("the figures of the database did not come within %g s", LIMIT)
        except CustodyError as error:
            logger.warning("the figures of the database could not be read: %s", error)
        return None

    async def _query(self) -> Overview:
        """The figures. They are cached from the moment in which they are there, which is before callbacks run."""
        try:
            return await self._look()
        finally:
            self._until = asyncio.get_running_loop().time() + KEEP


def _retrieve(look: asyncio.Future[Overview]) -> None:
    """Marks an error as retrieved: perhaps nobody waits for it any more."""
    if not look.cancelled():
        look.exception()


def families(overview: Overview | None, *, most_topics: int, most_groups: int) -> Iterator[Metric]:
    """The metrics of an overview; without one, only `custody_up` 0. The first topics and groups have series of their
    own, the others share one: sums, and the greatest age."""
    yield GaugeMetricFamily(
        "custody_up", "Whether the database gave its figures in time.", value=0 if overview is None else 1
    )
    if overview is None:
        return
    labels = ["topic", "group"]
    groups, rest = overview.groups[:most_groups], overview.groups[most_groups:]
    for name, text in _GROUPS.items():
        family = GaugeMetricFamily(f"custody_group_{name}", text, labels=labels)
        for one in groups:
            family.add_metric([one.topic, one.group], getattr(one, name))
        if rest:
            family.add_metric([OTHER, OTHER], sum(getattr(one, name) for one in rest))
        yield family
    age = GaugeMetricFamily(
        "custody_group_oldest_unresolved_age_seconds", "Age of the oldest message that is not resolved.", labels=labels
    )
    bound = GaugeMetricFamily("custody_group_bound", "1 if the group has bindings.", labels=labels)
    paused = GaugeMetricFamily("custody_group_paused", "1 while the group is paused.", labels=labels)
    breaker = GaugeMetricFamily(
        "custody_group_breaker_state",
        "1 for the current state of the group's circuit breaker.",
        labels=[*labels, "state"],
    )
    for one in groups:
        age.add_metric([one.topic, one.group], one.oldest_unresolved_age or 0.0)
        bound.add_metric([one.topic, one.group], one.bound)
        paused.add_metric([one.topic, one.group], one.paused)
        for state in BREAKER if one.breaker is not None else ():
            breaker.add_metric([one.topic, one.group, state], one.breaker == state)
    if rest:
        age.add_metric([OTHER, OTHER], max(one.oldest_unresolved_age or 0.0 for one in rest))
        bound.add_metric([OTHER, OTHER], sum(one.bound for one in rest))
        paused.add_metric([OTHER, OTHER], sum(one.paused for one in rest))
    yield from (age, bound, paused, breaker)
    held = GaugeMetricFamily("custody_topic_messages", "Messages that the log holds.", labels=["topic"])
    appended = CounterMetricFamily(
        "custody_topic_appended", "Messages ever appended, through any interface.", labels=["topic"]
    )
    for topic in overview.topics[:most_topics]:
        held.add_metric([topic.topic], topic.messages)
        appended.add_metric([topic.topic], topic.appended)
    if others := overview.topics[most_topics:]:
        held.add_metric([OTHER], sum(topic.messages for topic in others))
        appended.add_metric([OTHER], sum(topic.appended for topic in others))
    yield from (held, appended)
    yield from _of_pipelines(overview.pipelines[:most_groups])


def _of_pipelines(pipelines: list[PipelineState]) -> Iterator[Metric]:
    labels = ["topic", "group"]
    state = GaugeMetricFamily(
        "custody_pipeline_state", "1 for the current state of the pipeline.", labels=[*labels, "state"]
    )
    since = GaugeMetricFamily(
        "custody_pipeline_state_seconds", "Time since the pipeline entered its state.", labels=labels
    )
    seen = GaugeMetricFamily(
        "custody_pipeline_seen_seconds", "Time since the last sign of life of its driver.", labels=labels
    )
    tries = GaugeMetricFamily(
        "custody_pipeline_tries", "Consecutive failures without a committed batch.", labels=labels
    )
    for one in pipelines:
        name = [one.topic, one.group]
        for known in get_args(RunState):
            state.add_metric([*name, known], one.state == known)
        since.add_metric(name, one.for_seconds)
        seen.add_metric(name, one.seen_seconds)
        tries.add_metric(name, one.tries)
    yield from (state, since, seen, tries)
