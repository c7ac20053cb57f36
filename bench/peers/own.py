"""Custody itself."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from itertools import count

import custody
from bench.peers.callers import Handled, Step, in_threads
from bench.peers.peer import Done, Load
from bench.sizes import KEYS
from bench.stage import Stage
from custody import Custody, Lease, Message, Outgoing


class Own:
    version = f"Custody {version('custody')}"
    durability = "fsync at each publish and each ack; threads of one client share them"

    def __init__(self, c: Custody) -> None:
        self._c = c
        self._names = (f"orders-{number}" for number in count())
        self._topic = ""

    def empty(self, groups: int) -> None:
        if self._topic:
            self._c.delete_topic(self._topic)
        self._topic = next(self._names)
        self._c.create_topic(self._topic)
        for group in range(groups):
            self._c.create_group(self._topic, f"group-{group}")

    def publish(self, load: Load) -> Done:
        c, topic, payload = self._c, self._topic, b"x" * load.bytes
        if load.batch == 1:

            def one() -> int:
                c.publish(topic, payload, key="key")
                return 1

            return in_threads([one] * load.callers, load.seconds)
        batch = [Outgoing(payload, key=f"key-{number % KEYS}") for number in range(load.batch)]
        return in_threads([lambda: len(c.publish_many(topic, batch))] * load.callers, load.seconds)

    def consume(self, load: Load, group: int) -> Done:
        return in_threads([self._taking(load.batch, f"group-{group}") for _ in range(load.callers)], load.seconds)

    def _taking(self, batch: int, group: str) -> Step:
        lease: Lease | None = None

        def take() -> int:
            nonlocal lease
            held = self._c.claim(self._topic, group, max_messages=batch) if lease is None else lease
            if held:
                lease = held.next()  # acks it, too
            return len(held)

        return take

    def handle(self, load: Load) -> Done:
        waiting = self._c.stats(self._topic, "group-0").depth
        if not waiting:
            return Done(0, 0.0)
        numbers = count(1)

        def handler(_: Message) -> None:
            number = next(numbers)
            if number == 1:
                first.one()
            if number == waiting:
                worker.stop()

        worker = self._c.worker_for(self._topic, "group-0", handler, concurrency=load.callers)
        timer = threading.Timer(load.seconds, worker.stop)
        first = Handled(timer.start)
        messages = worker.run().done
        timer.cancel()
        return Done(messages, first.done().seconds)


@contextmanager
def opened(stage: Stage) -> Iterator[Own]:
    with stage.database() as url, custody.connect(url, worker="bench", share_commits=True) as c:
        yield Own(c)
