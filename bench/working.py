"""The worker: a handler that does nothing, and the way from publish to handler."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from time import perf_counter, time

import custody
from bench.backlog import fill
from bench.measure import Samples
from bench.report import Row, at_most
from bench.stage import Stage
from custody import Message, Policy


def rows(stage: Stage) -> Iterator[Row]:
    yield from handling(stage)
    yield from latency(stage)


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
