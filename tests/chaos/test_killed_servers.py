"""Two HTTP servers on one database, killed with -9 in turn under load: nothing is lost, nothing happens twice."""

from __future__ import annotations

import http.client
import json
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from tests.http.conftest import Process
from tests.waiting import wait_for

import custody

PUBLISHERS, CONSUMERS = 4, 4


class Servers:
    """Two servers, of which now and then one is killed and another takes its place."""

    def __init__(self, start: Callable[[], Process]) -> None:
        self._start = start
        self.running = [start(), start()]

    def replace(self, number: int) -> None:
        self.running[number].kill()
        self.running[number] = self._start()

    def ask(self, method: str, path: str, body: object = None) -> tuple[int, Any] | None:
        """The answer of one of them; None if the connection was lost, and whether it happened is unknown."""
        netloc = urlsplit(random.choice(self.running).http.url).netloc
        connection = http.client.HTTPConnection(netloc, timeout=20)
        try:
            connection.request(method, path, None if body is None else json.dumps(body))
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()

    def insist(self, method: str, path: str, body: object) -> Any:
        """The same again until there is an answer: only for what may be repeated."""
        while True:
            answer = self.ask(method, path, body)
            if answer is not None and answer[0] < 500:
                assert answer[0] == 200, answer
                return answer[1]


class Load:
    """Publishers that repeat what they do not know of, consumers that acknowledge each message by its receipt."""

    def __init__(self, servers: Servers, messages: int) -> None:
        self.servers, self.messages = servers, messages
        self.published: dict[str, tuple[int, int]] = {}
        self.acked: Counter[tuple[int, int]] = Counter()
        self.unknown: set[tuple[int, int]] = set()
        self.over = threading.Event()
        self.failures: list[BaseException] = []
        self._guard = threading.Lock()
        self.publishers = [threading.Thread(target=self._safe(self._publish, n)) for n in range(PUBLISHERS)]
        self.consumers = [threading.Thread(target=self._safe(self._consume, n)) for n in range(CONSUMERS)]

    def _safe(self, act: Callable[[int], None], number: int) -> Callable[[], None]:
        def run() -> None:
            try:
                act(number)
            except BaseException as error:
                self.failures.append(error)

        return run

    def _publish(self, number: int) -> None:
        producer = f"producer {number}"
        epoch = self.servers.insist("POST", "/producers/init", {"producer_id": producer})["epoch"]
        for sequence in range(self.messages // PUBLISHERS):
            payload = f"{number}/{sequence}"
            body = {"topic": "orders", "payload": payload, "key": f"k{sequence % 7}", "producer_id": producer}
            receipt = self.servers.insist("POST", "/messages", {**body, "epoch": epoch, "sequence": sequence})
            with self._guard:
                self.published[payload] = (receipt["partition"], receipt["offset"])

    def _consume(self, number: int) -> None:
        path = "/messages/orders?group=g&max=4&wait=300ms&visibility_timeout=2s"
        while not self.over.is_set():
            answer = self.servers.ask("GET", path)
            if answer is None or answer[0] != 200:
                continue
            for message in answer[1]["messages"]:
                place = (message["partition"], message["offset"])
                done = self.servers.ask("POST", "/messages/ack", {"receipt": message["receipt"]})
                with self._guard:
                    if done is None:
                        self.unknown.add(place)
                    elif done[0] == 200:
                        self.acked[place] += 1
                    else:
                        assert done[0] in (409, 503), done

    def start(self) -> None:
        for thread in (*self.publishers, *self.consumers):
            thread.start()


@pytest.fixture
def start(database_url: str, tmp_path: Path) -> Iterator[Callable[[], Process]]:
    started: list[Process] = []

    def begin() -> Process:
        started.append(Process(database_url, cwd=tmp_path))
        return started[-1]

    yield begin
    for one in started:
        if one.popen.poll() is None:
            one.popen.kill()
        one.popen.wait(10)
        if one.popen.stdout is not None:
            one.popen.stdout.close()


@pytest.mark.req("G11", "C5", "V5")
@pytest.mark.parametrize(
    ("messages", "kills"), [(400, 2), pytest.param(20_000, 12, marks=[pytest.mark.long, pytest.mark.timeout(1800)])]
)
def test_servers_killed_under_load_lose_nothing_and_repeat_nothing(
    database_url: str, start: Callable[[], Process], messages: int, kills: int
) -> None:
    with custody.connect(database_url) as c:
        c.create_topic("orders", partitions=2)
        c.create_group("orders", "g", custody.Policy(max_attempts=100))
        load = Load(Servers(start), messages)
        load.start()
        try:
            for kill in range(kills):
                share = messages * (kill + 1) // (kills + 1)
                wait_for(lambda at=share: load.failures or len(load.published) >= at, "the load goes on", timeout=600)
                load.servers.replace(kill % 2)
            for publisher in load.publishers:
                publisher.join(600)
            wait_for(
                lambda: load.failures or c.stats("orders", "g").depth == 0,
                lambda: f"everything is done: {c.stats('orders', 'g')}",
                timeout=600,
            )
        finally:
            load.over.set()
            for thread in (*load.publishers, *load.consumers):
                thread.join(60)
        assert not load.failures
        assert [server.stop() for server in load.servers.running] == [0, 0]

        log = {
            message.payload: (partition, message.offset)
            for partition in range(2)
            for first in range(0, c.topic("orders").tails[partition], 1000)
            for message in c.read("orders", partition, offset=first, max_messages=1000)
        }
        assert len(load.published) == sum(c.topic("orders").tails) == messages
        assert log == load.published  # each once, where its publisher was told
        assert max(load.acked.values()) == 1  # what one was told to be done, no other was
        assert set(log.values()) <= set(load.acked) | load.unknown
        assert c.dead("orders", "g") == []
