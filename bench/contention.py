"""Claiming beside much that is in flight, and beside many open cases."""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter

from bench.backlog import fill
from bench.measure import Samples
from bench.report import Row, at_most
from bench.stage import Connection, Stage
from custody import Custody, Policy

ORDERED = Policy(ordering="key", visibility_timeout="1h", max_in_flight=None, max_ack_holes=None)
SIZE = 100
TARGET = at_most(5)


def rows(stage: Stage) -> Iterator[Row]:
    busy, cases = stage.sizes.in_flight, stage.sizes.open_cases
    fresh = SIZE * (stage.sizes.claims + 10)
    with stage.open() as (c, connection):
        fill(c, connection, "calm", fresh, keys=None)
        c.create_group("calm", "workers", ORDERED)
        alone = claims(c, "calm", stage.sizes.claims)
        yield from percentiles(f"claim of {SIZE}, nothing else in flight", alone, alone, judged=False)
        for topic, keys, what in (
            ("other-keys", None, f"beside {busy:,} in flight of other keys"),
            ("shared-keys", busy * 10, f"beside {busy:,} in flight, a tenth of the keys shared"),
        ):
            fill(c, connection, topic, busy + 2 * fresh, keys=keys)
            c.create_group(topic, "workers", ORDERED)
            for _ in range(10):
                c.claim(topic, "workers", max_messages=busy // 10)
            yield from percentiles(f"claim of {SIZE} {what}", claims(c, topic, stage.sizes.claims), alone)
        fill(c, connection, "cases", fresh, keys=10_000)
        c.create_group("cases", "workers", ORDERED)
        open_cases(connection, "cases", cases)
        yield from percentiles(
            f"claim of {SIZE} beside {cases:,} open cases", claims(c, "cases", stage.sizes.claims), alone
        )


def claims(c: Custody, topic: str, count: int) -> Samples:
    """How long each claim takes, in milliseconds; what it took is acknowledged."""
    times = Samples()
    for turn in range(count + 5):
        start = perf_counter()
        lease = c.claim(topic, "workers", max_messages=SIZE)
        passed = perf_counter() - start
        if turn >= 5:
            times.values.append(passed * 1000)
        assert lease, f"the claim on {topic} was answered {lease.reason}"
        lease.ack()
    return times


def open_cases(connection: Connection, topic: str, count: int) -> None:
    """Failed messages that wait for long, each of a key of its own, as if they had been published before the log."""
    connection.execute(
        """INSERT INTO custody.cases (group_id, partition, "offset", key, state, attempts, failures, run_at, updated_at)
           SELECT g.group_id, 0, 1000000000 + n, 'waiting-' || n, 'waiting', 1, 1, now() + '1 day', now()
           FROM custody.groups g JOIN custody.topics t USING (topic_id), generate_series(1, %s) n WHERE t.name = %s""",
        [count, topic],
    )
    connection.execute("VACUUM (ANALYZE) custody.cases")


def percentiles(what: str, times: Samples, alone: Samples, *, judged: bool = True) -> Iterator[Row]:
    for name, value, other in (
        ("median", times.median, alone.median),
        ("p95", times.percentile(0.95), alone.percentile(0.95)),
    ):
        yield Row(
            what=f"{what}, {name}",
            measured=value,
            unit="ms",
            target=TARGET if judged else None,
            beside="alone" if judged else None,
            other=other if judged else None,
            ratio=value / other if judged else None,
        )
