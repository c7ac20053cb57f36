"""The metrics of workers, relays and pipelines, in the format of Prometheus.

Those that `custody serve` has too have the same names and labels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from custody import extras
from custody.model.outcomes import OUTCOMES, Counts
from custody.monitoring.shared import CONTENT_TYPE, DEAD, GROUP, RECEIVED, REDELIVERED, SETTLED, VERSION
from custody.vitals import BOUNDS, Running, Vitals

with extras.named():
    from prometheus_client import CollectorRegistry
    from prometheus_client.exposition import generate_latest
    from prometheus_client.metrics_core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
        InfoMetricFamily,
        Metric,
    )
    from prometheus_client.process_collector import ProcessCollector

Families = Callable[[], Iterable[Metric]]


class Working(Protocol):
    """The part of a worker that is shown."""

    vitals: Vitals

    @property
    def in_hand(self) -> int: ...
    @property
    def running(self) -> Running: ...
    @property
    def summary(self) -> Counts: ...


class Relaying(Protocol):
    """The part of a relay that is shown."""

    name: str
    vitals: Vitals

    @property
    def in_hand(self) -> int: ...
    @property
    def counts(self) -> Mapping[str, int]: ...
    @property
    def down(self) -> Sequence[str]: ...


def page(families: Families) -> tuple[bytes, str]:
    """All metrics as text, with those of the process, and its content type."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    registry.register(_Collector(families))
    return generate_latest(registry), CONTENT_TYPE


class _Collector:
    def __init__(self, families: Families) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        yield InfoMetricFamily("custody_build", "The version of Custody.", value={"version": VERSION})
        yield from self._families()


def of_workers(workers: Mapping[str, Working]) -> Iterable[Metric]:
    """The metrics of workers, by `topic/group`."""
    places = [(name.split("/"), worker) for name, worker in workers.items()]
    yield from _of_messages([(place, worker.vitals, worker.summary.dead) for place, worker in places])
    late = CounterMetricFamily(
        "custody_worker_outcomes_lost", "Outcomes that came after their lease had expired.", labels=GROUP
    )
    leases = CounterMetricFamily("custody_worker_leases_lost", "Leases that expired or were revoked.", labels=GROUP)
    in_hand = GaugeMetricFamily("custody_worker_in_flight", "Messages that it holds under leases.", labels=GROUP)
    calls = GaugeMetricFamily("custody_worker_handlers_running", "Calls of its handler that run.", labels=GROUP)
    oldest = GaugeMetricFamily(
        "custody_worker_oldest_handler_seconds", "How long the oldest call of its handler runs.", labels=GROUP
    )
    for place, worker in places:
        running = worker.running
        late.add_metric(place, worker.summary.lost)
        leases.add_metric(place, worker.vitals.leases_lost)
        in_hand.add_metric(place, worker.in_hand)
        calls.add_metric(place, running.count)
        oldest.add_metric(place, running.oldest)
    yield from (late, leases, in_hand, calls, oldest)
    vitals = [(place, worker.vitals) for place, worker in places]
    yield _durations("custody_worker_handling_seconds", "How long calls of its handler took.", GROUP, vitals)
    yield from _of_life("custody_worker", GROUP, vitals)


def of_pipelines(pipelines: Mapping[str, tuple[str, str, Vitals]]) -> Iterable[Metric]:
    """The metrics of pipelines by name: each with its topic, group and vitals."""
    vitals = [([topic, group], found) for topic, group, found in pipelines.values()]
    yield from _of_messages([(place, found, found.outcomes["died"]) for place, found in vitals])
    age = GaugeMetricFamily(
        "custody_pipeline_batch_age_seconds", "How long the running batch runs; 0 without one.", labels=GROUP
    )
    for place, found in vitals:
        began = found.began
        age.add_metric(place, Running.since([] if began is None else [began]).oldest)
    yield age
    yield _durations("custody_pipeline_batch_seconds", "How long batches took.", GROUP, vitals)
    yield from _of_life("custody_pipeline", GROUP, vitals)


def of_relay(relay: Relaying) -> Iterable[Metric]:
    """The metrics of a relay."""
    events = CounterMetricFamily("custody_relay_events", "Events by what became of them.", labels=["outcome"])
    for outcome, count in relay.counts.items():
        events.add_metric([outcome], count)
    yield events
    yield GaugeMetricFamily("custody_relay_in_flight", "Events that it has claimed.", value=relay.in_hand)
    yield GaugeMetricFamily(
        "custody_relay_destinations_down", "Destinations that are down, and probed.", value=len(relay.down)
    )
    vitals = [(list[str](), relay.vitals)]
    yield _durations("custody_relay_publish_seconds", "How long calls of publishers took.", [], vitals)
    yield from _of_life("custody_relay", [], vitals)


def _of_messages(found: Sequence[tuple[list[str], Vitals, int]]) -> Iterable[Metric]:
    """The counters that a server has too."""
    received, again, settled, dead = [
        CounterMetricFamily(name, text, labels=labels) for name, text, labels in (RECEIVED, REDELIVERED, SETTLED, DEAD)
    ]
    for place, vitals, died in found:
        received.add_metric(place, vitals.received)
        again.add_metric(place, vitals.redelivered)
        dead.add_metric(place, died)
        for outcome in OUTCOMES:
            settled.add_metric([*place, outcome], vitals.outcomes[outcome])
    yield from (received, again, settled, dead)


def _of_life(kind: str, labels: list[str], found: Sequence[tuple[list[str], Vitals]]) -> Iterable[Metric]:
    claimed = GaugeMetricFamily(
        f"{kind}_last_claim_timestamp_seconds", "When it last got something to do.", labels=labels
    )
    overdue = GaugeMetricFamily(
        f"{kind}_overdue_seconds", "For how long its slowest loop has not turned although it should.", labels=labels
    )
    for place, vitals in found:
        if vitals.claimed_at is not None:
            claimed.add_metric(place, vitals.claimed_at)
        overdue.add_metric(place, max(pulse.overdue for pulse in vitals.pulses))
    yield from (claimed, overdue)


def _durations(name: str, text: str, labels: list[str], found: Sequence[tuple[list[str], Vitals]]) -> Metric:
    family = HistogramMetricFamily(name, text, labels=labels)
    bounds = ["+Inf" if math.isinf(bound) else repr(float(bound)) for bound in BOUNDS]
    for place, vitals in found:
        counts, total = vitals.took.cumulated()
        family.add_metric(place, list(zip(bounds, counts, strict=True)), total)
    return family
