"""Order by key: what it costs when all goes well, and when some keys fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from time import perf_counter

from bench.backlog import fill
from bench.consuming import drainer
from bench.measure import in_turn, rate, ratio
from bench.report import Row, at_least
from bench.stage import Stage
from custody import Constant, Custody, Lease, Outcome, Policy

ORDERED = Policy(ordering="key", max_attempts=5, backoff=Constant("0s"))
TARGET = at_least(0.45)
LONGER = 4
KEYS = 1000
FAILING = frozenset(f"key-{number}" for number in range(KEYS // 100))


def rows(stage: Stage) -> Iterator[Row]:
    for size in (1000, 100):
        messages = size * stage.sizes.batches[size]
        yield from batch(stage, size, messages)
        yield from failures(stage, size, messages * LONGER)


def batch(stage: Stage, size: int, messages: int) -> Iterator[Row]:
    with stage.open() as (c, connection):
        fill(c, connection, "orders", messages, keys=KEYS)
        plain, ordered = drainer(c, "orders", size), drainer(c, "orders", size, ORDERED)
        plain()
        ordered()
        found = in_turn(
            stage.sizes.repetitions,
            {
                "plain": lambda: rate(messages, plain),
                "ordered": lambda: rate(messages, ordered),
                "flow": failing(c, "orders", size, to_the_end=False),
                "whole": failing(c, "orders", size, to_the_end=True),
            },
        )
    yield Row(
        what=f"ordered by key, batch {size:,}",
        measured=found["ordered"].median,
        unit="msg/s",
        beside="unordered",
        other=found["plain"].median,
        ratio=ratio(found["ordered"], found["plain"]),
        ratio_target=at_least(0.9),
    )
    for name, what in (("flow", "until the log is read"), ("whole", "until all is done")):
        yield Row(
            what=f"  batch {size:,}, 1 % of the keys fail twice, {what}",
            measured=found[name].median,
            unit="msg/s",
            beside="failure-free",
            other=found["ordered"].median,
            ratio=ratio(found[name], found["ordered"]),
            ratio_target=TARGET if name == "flow" else None,
        )


def failures(stage: Stage, size: int, messages: int) -> Iterator[Row]:
    """The same in a longer log: what a failing key costs must not grow with what waits behind it."""
    with stage.open() as (c, connection):
        fill(c, connection, "orders", messages, keys=KEYS)
        ordered = drainer(c, "orders", size, ORDERED)
        ordered()
        contenders = {"ordered": lambda: rate(messages, ordered), "flow": failing(c, "orders", size, to_the_end=False)}
        found = in_turn(stage.sizes.repetitions, contenders)
    yield Row(
        what=f"  batch {size:,}, 1 % of the keys fail twice, until a log of {LONGER} times the length is read",
        measured=found["flow"].median,
        unit="msg/s",
        beside="failure-free",
        other=found["ordered"].median,
        ratio=ratio(found["flow"], found["ordered"]),
        ratio_target=TARGET,
    )


_numbers = count()


def failing(c: Custody, topic: str, size: int, *, to_the_end: bool) -> Callable[[], float]:
    """Consumes the topic as a new group in which some keys fail twice on each message: messages done a second."""

    def drain() -> float:
        group = f"failing-{next(_numbers)}"
        c.create_group(topic, group, ORDERED)
        last = c.topic(topic).tails[0] - 1
        done = 0
        start = perf_counter()
        lease = c.claim(topic, group, max_messages=size)
        while lease:
            said = outcomes(lease)
            done += sum(outcome.kind == "ack" for outcome in said.values())
            # the very last messages may be of a failing key
            if not to_the_end and lease.messages[-1].offset >= last - 20:
                c.settle(lease.lease_id, said)
                break
            lease = lease.next(said)
        return done / (perf_counter() - start)

    return drain


def outcomes(lease: Lease) -> dict[int, Outcome]:
    """What a handler would say: a failing key fails on the first two attempts of a message, and goes no further."""
    done, failed = Outcome("ack"), Outcome("nack", error="the handler failed")
    stopped = set()
    said = {}
    for message in lease.messages:
        if message.key in stopped:
            continue
        if message.key in FAILING and message.attempt <= 2:
            stopped.add(message.key)
            said[message.offset] = failed
        else:
            said[message.offset] = done
    return said
