"""The cost of a message at the end of a large log against that of a small one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count

from bench.backlog import fill, outgoing
from bench.measure import in_turn, ratio, repeat, timed
from bench.report import Row, at_most
from bench.stage import Stage
from custody import Custody

SIZE = 1000


def rows(stage: Stage) -> Iterator[Row]:
    sizes = stage.sizes
    batches = min(20, sizes.small_log // SIZE)
    with stage.open() as (c, connection):
        work: dict[str, Callable[[], float]] = {}
        for topic, messages in (("small", sizes.small_log), ("large", sizes.large_log)):
            fill(c, connection, topic, messages)
            publish, consume = publishing(c, topic, batches), consuming(c, topic, batches)
            publish()
            consume()
            work |= {f"publish {topic}": publish, f"consume {topic}": consume}
        found = in_turn(sizes.repetitions * 2, work)
    for verb, what in (("publish", "publish"), ("consume", "claim + read + ack")):
        small, large = found[f"{verb} small"], found[f"{verb} large"]
        yield Row(
            what=f"{what} at the end of {sizes.large_log:,} messages",
            measured=large.median,
            unit="µs/msg",
            beside=f"of {sizes.small_log:,}",
            other=small.median,
            ratio=ratio(large, small),
            ratio_target=at_most(1.15),
        )


def publishing(c: Custody, topic: str, batches: int) -> Callable[[], float]:
    """Microseconds a message."""
    messages = outgoing(SIZE)
    return lambda: timed(lambda: repeat(batches, lambda: c.publish_many(topic, messages))) / (SIZE * batches) * 1e6


_numbers = count()


def consuming(c: Custody, topic: str, batches: int) -> Callable[[], float]:
    """Microseconds a message, as a new group that starts just before the end."""

    def consume() -> float:
        group = f"group-{next(_numbers)}"
        c.create_group(topic, group, start=c.topic(topic).tails[0] - SIZE * batches)

        def drain() -> None:
            while lease := c.claim(topic, group, max_messages=SIZE):
                lease.ack()

        return timed(drain) / (SIZE * batches) * 1e6

    return consume
