"""Servers are killed and started again under a client that publishes and one that works: nothing is lost or twice."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from urllib.parse import urlsplit

import pytest
from tests.http.conftest import Process
from tests.waiting import wait_for

import custody
from custody import Message, Receipt
from custody.errors import DatabaseUnavailable

Start = Callable[..., Process]
PARTITIONS = 4


class Publishers:
    """Threads that publish numbers through one client until they are told to stop."""

    def __init__(self, c: custody.Custody, threads: int) -> None:
        self._c, self._stop = c, threading.Event()
        self.receipts: dict[str, Receipt] = {}
        self.unknown: list[str] = []
        self.failed: list[BaseException] = []
        self._threads = [threading.Thread(target=self._run, args=[number]) for number in range(threads)]
        for thread in self._threads:
            thread.start()

    def _run(self, thread: int) -> None:
        number = 0
        try:
            while not self._stop.is_set():
                name = f"{thread}-{number}"
                number += 1
                try:
                    self.receipts[name] = self._c.publish("orders", name, key=name)
                except DatabaseUnavailable:
                    self.unknown.append(name)
        except BaseException as error:
            self.failed.append(error)

    def progress(self) -> None:
        """Waits until some more have arrived."""
        before = len(self.receipts)
        wait_for(lambda: len(self.receipts) > before + 20 or self.failed, "messages arrive", timeout=60)

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()
        assert not self.failed, self.failed


def restarts(c: custody.Custody, process: Start, *, kills: int, threads: int) -> None:
    c.create_topic("orders", partitions=PARTITIONS)
    c.create_group("orders", "g", custody.Policy(visibility_timeout="3s", max_attempts=100))
    server = process()
    port = str(urlsplit(server.http.url).port)
    handled: Counter[str] = Counter()
    guard = threading.Lock()

    def handle(message: Message) -> None:
        with guard:
            handled[message.payload] += 1

    with custody.connect(server.http.url, retry_for="60s") as remote:
        worker = remote.worker_for("orders", "g", handle)
        working = threading.Thread(target=worker.run)
        working.start()
        publishers = Publishers(remote, threads)
        try:
            for _ in range(kills):
                publishers.progress()
                server.kill()
                server = process("--port", port)
            publishers.progress()
        finally:
            publishers.stop()
            wait_for(lambda: c.stats("orders", "g").depth == 0, "everything is handled", timeout=60)
            worker.stop()
            working.join(30)
    assert not working.is_alive()
    log = {
        (message.partition, message.offset): message.payload
        for partition in range(PARTITIONS)
        for message in c.read("orders", partition, max_messages=1_000_000)
    }
    twice = [name for name, count in Counter(log.values()).items() if count > 1]
    assert not twice, twice
    for name, receipt in publishers.receipts.items():
        assert log[receipt.partition, receipt.offset] == name
    assert set(log.values()) <= set(publishers.receipts) | set(publishers.unknown)
    assert not publishers.unknown, "a minute was enough for each of them"
    assert set(handled) == set(log.values())


@pytest.mark.chaos
@pytest.mark.req("G11", "C8")
def test_a_client_publishes_and_works_through_restarts(database_url: str, process: Start) -> None:
    with custody.connect(database_url) as c:
        restarts(c, process, kills=2, threads=8)


@pytest.mark.long
@pytest.mark.req("G11", "C8")
def test_a_client_publishes_and_works_through_many_restarts(database_url: str, process: Start) -> None:
    with custody.connect(database_url) as c:
        restarts(c, process, kills=25, threads=16)
