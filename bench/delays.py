"""What delayed messages cost those who claim beside them, and how late they come to a worker that waits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from time import time

from bench.backlog import fill, outgoing
from bench.measure import Samples, in_turn, ratio, repeat, timed
from bench.report import Row, at_most
from bench.sizes import PAYLOAD_BYTES
from bench.stage import Stage
from custody import Custody, Message, Outgoing

BATCH = 10_000


def rows(stage: Stage) -> Iterator[Row]:
    yield from beside(stage)
    yield from lateness(stage)


def beside(stage: Stage) -> Iterator[Row]:
    """Claim + read + ack in a topic with a million delayed messages and in one without any, in turn."""
    sizes = stage.sizes
    work: dict[str, Callable[[], float]] = {}
    with stage.open() as (c, connection):
        for topic in ("without", "with"):
            fill(c, connection, topic, sizes.small_log)
        store = timed(lambda: delay(c, "with", sizes.delayed))
        for topic in ("without", "with"):
            for size in (1, 100):
                c.create_group(topic, f"by-{size}")
                work[f"{topic} {size}"] = consuming(c, topic, size, min(sizes.claims, sizes.small_log // size // 40))
        repeat(3, lambda: [take() for take in work.values()])
        found = in_turn(sizes.repetitions * 2, work)
    yield Row(
        what=f"store {sizes.delayed:,} delayed messages by {BATCH:,}", measured=sizes.delayed / store, unit="msg/s"
    )
    for size in (1, 100):
        without, with_them = found[f"without {size}"], found[f"with {size}"]
        yield Row(
            what=f"claim + read + ack of {size} beside {sizes.delayed:,} delayed",
            measured=with_them.median,
            unit="ms",
            beside="without any",
            other=without.median,
            ratio=ratio(with_them, without),
            ratio_target=at_most(1.2),
        )


def delay(c: Custody, topic: str, count: int) -> None:
    due = datetime.now(UTC) + timedelta(days=1)
    for start in range(0, count, BATCH):
        c.publish_delayed(
            topic,
            [
                Outgoing(b"%0*d" % (PAYLOAD_BYTES, n), deliver_at=due + timedelta(milliseconds=n * 7919 % count))
                for n in range(start, min(count, start + BATCH))
            ],
        )


def consuming(c: Custody, topic: str, size: int, claims: int) -> Callable[[], float]:
    """Milliseconds a claim; when the group has seen everything it starts again."""

    def take() -> None:
        lease = c.claim(topic, f"by-{size}", max_messages=size)
        if not lease:
            c.publish_many(topic, outgoing(size * claims))
            lease = c.claim(topic, f"by-{size}", max_messages=size)
        lease.ack()

    return lambda: timed(lambda: repeat(claims, take)) / claims * 1000


def lateness(stage: Stage) -> Iterator[Row]:
    """From the moment when a message is due to inside the handler, with a worker that waits for it."""
    found = Samples()
    calls = stage.sizes.calls
    all_there = threading.Event()

    def handler(message: Message) -> None:
        found.values.append((time() - message.payload) * 1000)
        if len(found.values) == calls:
            all_there.set()

    with stage.open() as (c, _):
        c.create_topic("calls")
        c.create_group("calls", "callee")
        worker = c.worker_for("calls", "callee", handler)
        thread = threading.Thread(target=worker.run)
        thread.start()
        start = time() + 1
        for number in range(calls):
            due = start + number * 0.037
            c.publish("calls", due, deliver_at=datetime.fromtimestamp(due, UTC))
        all_there.wait(60 + calls * 0.04)
        worker.stop()
        thread.join()
    for name, share, target in (("p50", 0.5, None), ("p99", 0.99, at_most(100))):
        yield Row(
            what=f"delayed message, due → handler, {name}", measured=found.percentile(share), unit="ms", target=target
        )
