"""The counters of a server, in the format of Prometheus. Each server has a registry of its own.

The lookup of a counter's labels costs more than counting, so each set of labels is bound once and cached.
"""

from __future__ import annotations

from collections import Counter as Counted
from collections.abc import Callable, Iterable, Sequence
from uuid import UUID

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector

from custody.http.connections import Connections
from custody.http.database_metrics import OTHER, Overview, families
from custody.model.entities import Delayed, Receipt
from custody.monitoring.shared import DEAD, RECEIVED, REDELIVERED, SETTLED, VERSION
from custody.outbox.metrics import exposition
from custody.verbs.claim import Lease

UNKNOWN = "-"
"""The label for unknown methods, paths, topics and groups, of which there may be any number."""
MOST_TOPICS = 1_000
MOST_GROUPS = 2_000
"""Most topics, and groups, with series of their own; all others are added up under OTHER."""
LEASES = 20_000
"""Most leases whose topic and group are remembered: an ack names only the lease."""
_METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"})
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class Metrics:
    """Counts events. Written in the event loop, read from any thread."""

    def __init__(
        self,
        *,
        waiting: Callable[[], int],
        connections: Callable[[], tuple[int, int, int, int]],
        clients: Connections,
        bodies: Callable[[], int],
    ) -> None:
        self._registry = registry = CollectorRegistry()
        self._connections, self._clients, self._bodies = connections, clients, bodies
        ProcessCollector(registry=registry)
        Info("custody_build", "The version of Custody.", registry=registry).info({"version": VERSION})
        self._requests = Counter(
            "custody_http_requests", "Requests that were answered.", ["method", "route", "status"], registry=registry
        )
        self._took = Histogram(
            "custody_http_request_duration_seconds",
            "Time from the first byte to the last; that of a long poll includes its wait.",
            ["method", "route"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._published = Counter(
            "custody_messages_published", "Messages that were accepted.", ["topic"], registry=registry
        )
        self._duplicates = Counter(
            "custody_messages_duplicate", "Messages that were recognised as repeats.", ["topic"], registry=registry
        )
        self._received = Counter(*RECEIVED, registry=registry)
        self._redelivered = Counter(*REDELIVERED, registry=registry)
        self._settled = Counter(*SETTLED, registry=registry)
        self._dead = Counter(*DEAD, registry=registry)
        # a series has to begin at 0, or Prometheus does not see its first increase
        self._dead.labels(UNKNOWN, UNKNOWN)
        self._coalesced = Histogram(
            "custody_coalesced_requests",
            "Requests that shared a transaction.",
            ["operation"],
            buckets=_REQUESTS,
            registry=registry,
        )
        polls = Gauge("custody_waiting_polls", "Long polls that wait for messages.", registry=registry)
        polls.set_function(waiting)
        self._open = Gauge(
            "custody_http_connections",
            "Connections of clients: trusted ones, on which a request was admitted, and others.",
            ["state"],
            registry=registry,
        )
        self._buffered = Gauge(
            "custody_http_buffered_bytes",
            "Bytes of large bodies that are being read or handled, and of answers that clients have not read.",
            ["kind"],
            registry=registry,
        )
        self._in_use = Gauge(
            "custody_database_connections", "Connections to the database.", ["state"], registry=registry
        )
        self._most = Gauge(
            "custody_database_connections_max", "The limit of connections to the database.", registry=registry
        )
        self._queue = Gauge(
            "custody_database_connections_waiting", "Calls that wait for a connection.", registry=registry
        )
        self._of_requests: dict[tuple[str, str, int], tuple[Counter, Histogram]] = {}
        self._of_topics: dict[str, tuple[Counter, Counter]] = {}
        self._groups: set[tuple[str, str]] = {(UNKNOWN, UNKNOWN)}
        self._of_groups: dict[tuple[str, str], tuple[Counter, Counter]] = {}
        self._of_outcomes: dict[tuple[str, str, str], Counter] = {}
        self._leases: dict[UUID, tuple[str, str]] = {}

    def answered(self, method: str, route: str, status: int, took: float) -> None:
        """Counts an answered request; `took` is in seconds."""
        found = self._of_requests.get((method, route, status))
        if found is None:
            if method not in _METHODS:  # a client may send any word
                method = UNKNOWN
            found = self._requests.labels(method, route, str(status)), self._took.labels(method, route)
            if method != UNKNOWN:
                self._of_requests[method, route, status] = found
        count, duration = found
        count.inc()
        duration.observe(took)

    def published(self, placed: Sequence[Receipt | Delayed]) -> None:
        if len(placed) == 1:
            self._count_published(placed[0].topic, placed[0].duplicate, 1)
            return
        for (topic, duplicate), count in Counted((one.topic, one.duplicate) for one in placed).items():
            self._count_published(topic, duplicate, count)

    def _count_published(self, topic: str, duplicate: bool, count: int) -> None:
        found = self._of_topics.get(topic)
        if found is None and len(self._of_topics) >= MOST_TOPICS:
            topic = OTHER
            found = self._of_topics.get(topic)
        if found is None:
            found = self._of_topics[topic] = self._published.labels(topic), self._duplicates.labels(topic)
        found[duplicate].inc(count)

    def received(self, topic: str, group: str, lease: Lease) -> None:
        """Counts delivered messages, and remembers the topic and group of their lease."""
        topic, group = self._named(topic, group)
        found = self._of_groups.get((topic, group))
        if found is None:
            found = self._received.labels(topic, group), self._redelivered.labels(topic, group)
            self._of_groups[topic, group] = found
            self._dead.labels(topic, group)
        received, redelivered = found
        received.inc(len(lease))
        redelivered.inc(sum(message.attempt > 1 for message in lease))
        if len(self._leases) >= LEASES:
            del self._leases[next(iter(self._leases))]
        self._leases[lease.lease_id] = topic, group

    def _named(self, topic: str, group: str) -> tuple[str, str]:
        """The labels of a group; OTHER beyond the limit."""
        if (topic, group) not in self._groups:
            if len(self._groups) >= MOST_GROUPS:
                return OTHER, OTHER
            self._groups.add((topic, group))
        return topic, group

    def settled(self, lease_id: UUID, outcome: str, count: int) -> None:
        """Counts settled messages of a lease. The group of another server's lease is unknown here."""
        self.settled_in(*self._leases.get(lease_id, (UNKNOWN, UNKNOWN)), outcome, count)

    def settled_in(self, topic: str, group: str, outcome: str, count: int) -> None:
        topic, group = self._named(topic, group)
        found = self._of_outcomes.get((topic, group, outcome))
        if found is None:
            found = self._of_outcomes[topic, group, outcome] = self._settled.labels(topic, group, outcome)
        found.inc(count)

    def died(self, lease_id: UUID, count: int) -> None:
        """Counts messages of a lease that died when they were settled."""
        if count:
            self._dead.labels(*self._leases.get(lease_id, (UNKNOWN, UNKNOWN))).inc(count)

    def coalesced(self, operation: str) -> Callable[[int], object]:
        """A function that counts the requests of one transaction of an operation."""
        return self._coalesced.labels(operation).observe

    def exposition(self, overview: Overview | None) -> bytes:
        """All metrics as text, with the figures of the database if there are any."""
        in_use, idle, most, waiting = self._connections()
        self._in_use.labels("in_use").set(in_use)
        self._in_use.labels("idle").set(idle)
        self._most.set(most)
        self._queue.set(waiting)
        for state, count in zip(("trusted", "other"), self._clients.count(), strict=True):
            self._open.labels(state).set(count)
        self._buffered.labels("bodies").set(self._bodies())
        self._buffered.labels("answers").set(self._clients.waiting())
        closed = CounterMetricFamily(
            "custody_http_connections_closed",
            "Connections that the server closed: to make room, refused at once, or because the answer was not read.",
            labels=["reason"],
        )
        for reason, count in self._clients.closed.items():
            closed.add_metric([reason], count)
        text = generate_latest(
            _WithoutCreated(
                [
                    *self._registry.collect(),
                    closed,
                    *families(overview, most_topics=MOST_TOPICS, most_groups=MOST_GROUPS),
                ]
            )
        )
        return text if overview is None else text + exposition(overview.outbox).encode()


class _WithoutCreated:
    """A collector without `_created` series (when a series began), which would double their number."""

    def __init__(self, metrics: Sequence[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        for metric in self._metrics:
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric
