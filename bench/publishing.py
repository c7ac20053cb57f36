"""Publishing, beside the same rows by bare COPY into a table of the same shape."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import custody
from bench.backlog import outgoing
from bench.copying import BareCopy
from bench.measure import in_turn, rate, ratio, repeat
from bench.report import Row, at_least
from bench.stage import Stage
from custody import Custody, Outgoing

TARGETS = {1000: 250_000, 100: 75_000}
RATIOS = {1000: 1.2, 100: 0.8}


def rows(stage: Stage) -> Iterator[Row]:
    for size in (1000, 100):
        yield from batch(stage, size)
    yield single(stage)
    for threads in (8, 32):
        yield from_threads(stage, threads)


def batch(stage: Stage, size: int) -> Iterator[Row]:
    batches = stage.sizes.batches[size]
    messages = outgoing(size)
    with stage.open() as (c, connection):
        bare = BareCopy(c, connection, messages)
        bare.encoding(5)()
        publish = publisher(c, messages)
        found = in_turn(
            stage.sizes.repetitions,
            {
                "publish": lambda: rate(size * batches, lambda: repeat(batches, publish)),
                "encoding": lambda: rate(size * batches, bare.encoding(batches)),
                "prepared": lambda: rate(size * batches, bare.prepared(batches)),
            },
        )
    yield Row(
        what=f"publish, batch {size:,}",
        measured=found["publish"].median,
        unit="msg/s",
        target=at_least(TARGETS[size]),
        beside="bare COPY",
        other=found["encoding"].median,
        ratio=ratio(found["publish"], found["encoding"]),
        ratio_target=at_least(RATIOS[size]),
    )
    yield Row(
        what=f"  batch {size:,}, against the server alone",
        measured=found["publish"].median,
        unit="msg/s",
        beside="bare COPY, encoded before",
        other=found["prepared"].median,
        ratio=ratio(found["publish"], found["prepared"]),
    )


def publisher(c: Custody, messages: Sequence[Outgoing]) -> Callable[[], object]:
    """Publishes the batch once a call; warm."""
    c.create_topic("published")
    for _ in range(5):
        c.publish_many("published", messages)
    return lambda: c.publish_many("published", messages)


def single(stage: Stage) -> Row:
    """One message a call: what counts is the round trip and the commit."""
    batches = stage.sizes.batches[1]
    with stage.open() as (c, connection):
        publish = publisher(c, outgoing(1))
        connection.execute("CREATE TABLE bare (n bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, payload bytea)")
        payload = outgoing(1)[0].payload

        def insert() -> None:
            connection.execute("INSERT INTO bare (payload) VALUES (%s)", [payload])

        found = in_turn(
            stage.sizes.repetitions,
            {
                "publish": lambda: rate(batches, lambda: repeat(batches, publish)),
                "insert": lambda: rate(batches, lambda: repeat(batches, insert)),
            },
        )
    return Row(
        what="publish, one at a time",
        measured=found["publish"].median,
        unit="msg/s",
        beside="bare INSERT",
        other=found["insert"].median,
        ratio=ratio(found["publish"], found["insert"]),
        ratio_target=at_least(0.6),
    )


def from_threads(stage: Stage, threads: int) -> Row:
    """One message a call, from many threads of one client that share commits, beside a lone thread of it."""
    times = max(1, stage.sizes.batches[1] // threads)
    message = outgoing(1)[0]
    with stage.database() as url, custody.connect(url, share_commits=True) as c, ThreadPoolExecutor(threads) as pool:
        c.create_topic("published")

        def publish(_: int) -> None:
            repeat(times, lambda: c.publish("published", message.payload, key=message.key))

        def by(callers: int) -> float:
            return rate(times * callers, lambda: [*pool.map(publish, range(callers))])

        by(threads)
        found = in_turn(stage.sizes.repetitions, {"together": lambda: by(threads), "one": lambda: by(1)})
    return Row(
        what=f"publish, one at a time, {threads} threads",
        measured=found["together"].median,
        unit="msg/s",
        beside="one thread",
        other=found["one"].median,
        ratio=ratio(found["together"], found["one"]),
        ratio_target=at_least(8) if threads == 32 else None,
    )
