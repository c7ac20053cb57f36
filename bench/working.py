"""The worker: a handler that does nothing, the way from publish to handler, and producing and consuming at once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from time import perf_counter, time

import custody
from bench.backlog import fill
from bench.measure import Samples
from bench.report import Row, at_least, at_most
from bench.sizes import KEYS, PAYLOAD_BYTES
from bench.stage import Stage
from custody import Message, Outgoing, Policy

BATCH = 1000


def rows(stage: Stage) -> Iterator[Row]:
    yield from handling(stage)
    yield from latency(stage)
    yield from both_ways(stage)


def handling(stage: Stage) -> Iterator[Row]:
    messages = stage.sizes.worker_messages
    with stage.open() as (c, connection):
        fill(c, connection, "orders", messages)
        for ordering in ("none", "key"):
            for concurrency in (1, 8, 32):
                found = Samples()
                for repetition in range(stage.sizes.repetitions):
                    group = f"{ordering}-{concurrency}-{repetition}"
                    c.create_group("orders", group, Policy(ordering=ordering))
                    found.values.append(messages / handled(c, group, messages, concurrency))
                yield Row(
                    what=f"worker, no-op handler, concurrency {concurrency}{', ordered' if ordering == 'key' else ''}",
                    measured=found.median,
                    unit="msg/s",
                )


def handled(c: custody.Custody, group: str, messages: int, concurrency: int) -> float:
    """Seconds from the start of a worker to the return of its run, with everything settled."""
    left = iter(range(messages - 1))
    start = perf_counter()

    def handler(_: Message) -> None:
        if next(left, None) is None:
            worker.stop()

    worker = c.worker_for("orders", group, handler, concurrency=concurrency)
    summary = worker.run()
    assert summary.done == messages, summary
    return perf_counter() - start


def latency(stage: Stage) -> Iterator[Row]:
    """One message at a time on an idle system, from before the publish to inside the handler."""
    found = Samples()
    arrived = threading.Event()

    def handler(message: Message) -> None:
        found.values.append((time() - message.payload) * 1000)
        arrived.set()

    with stage.open() as (c, _):
        c.create_topic("calls")
        c.create_group("calls", "callee")
        worker = c.worker_for("calls", "callee", handler)
        thread = threading.Thread(target=worker.run)
        thread.start()
        for _ in range(stage.sizes.calls):
            arrived.clear()
            c.publish("calls", time())
            arrived.wait(10)
            threading.Event().wait(0.01)  # let the worker find nothing and wait again
        worker.stop()
        thread.join()
    for what, value, bound in (("p50", found.median, 5), ("p99", found.percentile(0.99), 25)):
        yield Row(what=f"publish → handler, idle, {what}", measured=value, unit="ms", target=at_most(bound))


def both_ways(stage: Stage) -> Iterator[Row]:
    """A producer and a consumer in threads of their own, in batches; the first and last tenth of the time compared."""
    payload = b"x" * PAYLOAD_BYTES
    batch = [Outgoing(payload, key=f"key-{n % KEYS}") for n in range(BATCH)]
    produced: list[float] = []
    consumed: list[tuple[float, int]] = []
    with stage.open() as (c, _):
        c.create_topic("orders")
        c.create_group("orders", "stock", Policy(ordering="key"))
        start = perf_counter()
        until = start + stage.sizes.both_seconds

        def produce() -> None:
            while perf_counter() < until:
                c.publish_many("orders", batch)
                produced.append(perf_counter())

        def consume() -> None:
            while perf_counter() < until:
                lease = c.claim("orders", "stock", max_messages=BATCH)
                if lease:
                    lease.ack()
                    consumed.append((perf_counter(), len(lease)))

        threads = [threading.Thread(target=produce), threading.Thread(target=consume)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    seconds = stage.sizes.both_seconds
    taken = sum(count for _, count in consumed)
    tenth = seconds / 10
    first = sum(count for at, count in consumed if at < start + tenth) / tenth
    last = sum(count for at, count in consumed if at >= until - tenth) / tenth
    yield Row(
        what=f"in, while consuming, {seconds:g} s",
        measured=len(produced) * BATCH / seconds,
        unit="msg/s",
        target=at_least(70_000),
    )
    yield Row(
        what="out, while producing",
        measured=taken / seconds,
        unit="msg/s",
        target=at_least(70_000),
        beside="the first tenth",
        other=first,
        ratio=last / first if first else 0.0,
    )
