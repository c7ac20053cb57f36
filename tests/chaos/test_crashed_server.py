"""PostgreSQL stopped in the middle of everything: what was acknowledged is still there, and those at work go on."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest
from tests.order_rule import audit
from tests.waiting import wait_for

import custody
from custody.errors import DatabaseUnavailable, LeaseLost
from custody.store import embedded

TOPIC = "orders"
GROUP = "stock"


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A server of the test's own, with every write flushed."""
    place = tmp_path / "custody"
    with embedded.acquire(place):
        yield place


class Load:
    """Two publishers and two workers that go on through every error of the database, and note what they were told."""

    def __init__(self, c: custody.Custody) -> None:
        self.c = c
        self.stop = threading.Event()
        self.lock = threading.Lock()
        self.receipts: dict[tuple[int, int], str] = {}
        self.unknown: set[str] = set()
        self.acked: set[tuple[int, int]] = set()
        self.attempts: dict[tuple[int, int], list[int]] = defaultdict(list)
        self.after_ack: list[tuple[int, int]] = []
        self.outages: Counter[str] = Counter()
        self.failures: list[BaseException] = []
        self.threads = [
            threading.Thread(target=self._guard, args=(work, n))
            for n in range(2)
            for work in (self._publish, self._work)
        ]

    def _guard(self, work: Callable[[int], None], number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            self.failures.append(error)

    def _publish(self, number: int) -> None:
        n = 0
        while not self.stop.is_set():
            n += 1
            # in turn one INSERT and one COPY
            names = [f"{number}/{n}/{i}" for i in range(80 if n % 4 == 0 else 3)]
            batch = [custody.Outgoing(name, key=f"key {hash(name) % 20}") for name in names]
            try:
                receipts = self.c.publish_many(TOPIC, batch)
            except DatabaseUnavailable:
                with self.lock:
                    self.unknown.update(names)
                    self.outages["publish"] += 1
                continue
            with self.lock:
                for name, receipt in zip(names, receipts, strict=True):
                    self.receipts[receipt.partition, receipt.offset] = name

    def _work(self, number: int) -> None:
        while not self.stop.is_set():
            try:
                lease = self.c.claim(TOPIC, GROUP, max_messages=20, visibility_timeout="500ms")
            except DatabaseUnavailable:
                self.outages["claim"] += 1
                continue
            places = [(message.partition, message.offset) for message in lease]
            with self.lock:
                for message, place in zip(lease, places, strict=True):
                    self.attempts[place].append(message.attempt)
                self.after_ack += [place for place in places if place in self.acked]
            if not lease:
                continue
            try:
                lease.ack()
            except DatabaseUnavailable:
                self.outages["ack"] += 1
            except LeaseLost:
                pass
            else:
                with self.lock:
                    self.acked.update(places)


def more(count: Callable[[], int], than: int = 0) -> Callable[[], bool]:
    """Whether the count has grown by more than that since now."""
    limit = count() + than
    return lambda: count() > limit


@pytest.mark.req("C3", "V5")
@pytest.mark.parametrize("crashes", [2, pytest.param(12, marks=pytest.mark.long)])
def test_nothing_acknowledged_is_lost_in_a_crash(home: Path, crashes: int) -> None:
    with custody.connect(home=home) as c:
        c.create_topic(TOPIC, partitions=2)
        c.create_group(TOPIC, GROUP, custody.Policy(ordering="key"))
        load = Load(c)
        for thread in load.threads:
            thread.start()
        try:
            for _ in range(crashes):
                wait_for(more(lambda: len(load.acked), 100), "no load", timeout=60)
                noticed = more(load.outages.total)
                embedded.stop(home, mode="immediate")
                wait_for(noticed, "nobody noticed", timeout=60)
                embedded.acquire(home).close()
            wait_for(more(lambda: len(load.acked), 100), lambda: f"nobody recovered: {load.failures}", timeout=60)
        finally:
            load.stop.set()
            for thread in load.threads:
                thread.join(60)
        assert load.failures == []

        def drained() -> bool:
            lease = c.claim(TOPIC, GROUP, max_messages=1000)
            load.after_ack += [place for m in lease if (place := (m.partition, m.offset)) in load.acked]
            for message in lease:
                load.attempts[message.partition, message.offset].append(message.attempt)
            if lease:
                lease.ack()
            return c.stats(TOPIC, GROUP).depth == 0

        wait_for(drained, lambda: f"the group does not come to an end: {c.stats(TOPIC, GROUP)}", timeout=60)

        assert len(load.receipts) > 100
        held: dict[tuple[int, int], str] = {}
        for partition, tail in enumerate(c.topic(TOPIC).tails):
            messages = c.read(TOPIC, partition, max_messages=tail + 1)
            assert [message.offset for message in messages] == list(range(tail)), "dense"
            held |= {(partition, message.offset): message.payload for message in messages}
        # committed: it is where the receipt says. unknown: there once or not at all. Nothing else is there.
        assert {place: held.get(place) for place in load.receipts} == load.receipts
        names = Counter(held.values())
        assert set(names.values()) == {1}
        assert set(names) <= set(load.receipts.values()) | load.unknown
        # done stays done, and each delivery counts from where the one before it left off
        assert load.after_ack == []
        assert set(load.attempts) == set(held)
        for place, attempts in load.attempts.items():
            assert attempts == sorted(set(attempts)), f"{place}: {attempts}"
        with psycopg.connect(c.database_url, autocommit=True) as db:
            for partition in (0, 1):
                assert audit(db, TOPIC, GROUP, partition).violations == []
