"""One key floods a partition: how many messages are handled before those of the others, and what fairness costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial
from statistics import median
from time import perf_counter

from bench.backlog import fill
from bench.consuming import drainer
from bench.measure import in_turn, rate, ratio
from bench.report import Row, at_least, at_most
from bench.stage import Stage
from custody import Custody, Outgoing, Policy
from custody.model.lanes import PRIORITIES, WEIGHTS

OTHERS, EACH = 10, 5
PLAIN = Policy(ordering="key", max_ack_holes=None)
FAIR = Policy(ordering="key", fairness="key", max_ack_holes=None)


def rows(stage: Stage) -> Iterator[Row]:
    flood = stage.sizes.small_log
    with stage.open() as (c, connection):
        for size in (1, 100):
            # a queue for each key, served in turn: all eleven until the others are done
            best = (OTHERS + 1) * (EACH + 1) / 2
            late = {}
            for name, policy in (("off", PLAIN), ("on", FAIR)):
                topic = f"flood-{name}-{size}"
                _flood(c, topic, flood, policy)
                late[name] = _delay(c, topic, size, flood)
            yield Row(
                what=f"handled before a message of another key, {flood:,} of one key before it, leases of {size}",
                measured=late["on"],
                unit="messages",
                beside="a queue for each key",
                other=best,
                ratio=late["on"] / best,
                ratio_target=at_most(2 + size / best),
            )
            yield Row(what=f"the same without fairness, leases of {size}", measured=late["off"], unit="messages")
        messages = stage.sizes.batches[100] * 100
        for keys in (10_000, 10):
            fill(c, connection, f"cost-{keys}", messages, keys=keys)
            found = in_turn(
                stage.sizes.repetitions,
                {
                    name: partial(rate, messages, drainer(c, f"cost-{keys}", 100, policy))
                    for name, policy in (("off", PLAIN), ("on", FAIR))
                },
            )
            yield Row(
                what=f"claim + read + ack with fairness, batch 100, {keys:,} keys",
                measured=found["on"].median,
                unit="msg/s",
                beside="without",
                other=found["off"].median,
                ratio=ratio(found["on"], found["off"]),
                ratio_target=at_least(0.6),
            )
        yield from _lanes(c, stage.sizes.claims * 25)


def _flood(c: Custody, topic: str, flood: int, policy: Policy) -> None:
    c.create_topic(topic)
    c.create_group(topic, "workers", policy)
    for _ in range(0, flood, 1000):
        c.publish_many(topic, [Outgoing(0, key="flood")] * min(1000, flood))
    c.publish_many(topic, [Outgoing(n, key=f"other-{n % OTHERS}") for n in range(OTHERS * EACH)])


def _delay(c: Custody, topic: str, size: int, flood: int) -> float:
    """The median of how many messages were handled before each of the others; without fairness it is the flood."""
    handled, late = 0, []
    while len(late) < OTHERS * EACH:
        lease = c.claim(topic, "workers", max_messages=size)
        for message in lease:
            handled += 1
            if message.key != "flood":
                late.append(handled)
        lease.ack()
        if handled > 2000 and not late:
            return flood
    return float(median(late))


def _lanes(c: Custody, claims: int) -> Iterator[Row]:
    c.create_topic("jobs", priorities=True, starvation_limit="1d")
    c.create_group("jobs", "workers")
    for priority in PRIORITIES:
        for _ in range(0, claims, 1000):
            c.publish_many("jobs", [Outgoing(n, priority=priority) for n in range(1000)])
    seen: Counter[str | None] = Counter()
    start = perf_counter()
    for _ in range(claims):
        lease = c.claim("jobs", "workers")
        seen.update(message.priority for message in lease)
        lease.ack()
    took = (perf_counter() - start) / claims * 1000
    for priority, weight in WEIGHTS.items():
        share = seen[priority] * 100 / claims
        yield Row(
            what=f"share of {priority}",
            measured=share or 0.01,
            unit="%",
            beside="weight",
            other=weight,
            ratio=share / weight,
        )
    yield Row(what="claim + ack of one message with priorities", measured=took, unit="ms")
