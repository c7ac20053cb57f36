"""No handler begins on a lease that may have run out: the database cut off, the process stopped, the loop held up."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import NamedTuple

import psycopg
import pytest
from tests.chaos.proxy import Proxy
from tests.http.conftest import served
from tests.waiting import wait_for
from tests.worker.conftest import Start

import custody
from custody import Message, Outgoing, Policy
from custody.elapsed import elapsed, holds_until
from custody.worker.handler_runner import HandlerRunner, NotBegun

MESSAGES, KEYS, VISIBILITY = 400, 4, 1.0


class Begun(NamedTuple):
    at: float
    worker: str
    key: str | None
    offset: int


class Book:
    """When which worker began which message."""

    def __init__(self) -> None:
        self.begun: list[Begun] = []
        self._pause = threading.Event()

    def handler(self, worker: str) -> Callable[[Message], None]:
        def handle(message: Message) -> None:
            self.begun.append(Begun(elapsed(), worker, message.key, message.offset))
            self._pause.wait(0.02)

        return handle

    def of(self, worker: str) -> list[Begun]:
        return [one for one in self.begun if one.worker == worker]


@contextmanager
def far_from(url: str, door: str) -> Iterator[tuple[custody.Custody, Proxy]]:
    """Custody through a proxy: directly, or by a server that is behind it."""
    with ExitStack() as stack:
        proxy = stack.enter_context(closing(Proxy(url)))
        opened = stack.enter_context(custody.connect(proxy.url, worker="far"))
        if door == "http":
            server = stack.enter_context(served(opened))
            opened = stack.enter_context(custody.connect(server.url, worker="far"))
        yield opened, proxy


@pytest.mark.chaos
@pytest.mark.req("X2")
@pytest.mark.parametrize("door", ["direct", "http"])
def test_a_worker_cut_off_from_the_database_begins_nothing_on_a_lease_that_may_be_over(
    live: custody.Custody, database_url: str, start: Start, door: str
) -> None:
    live.create_topic("t")
    live.create_group("t", "g", Policy(ordering="key", visibility_timeout=VISIBILITY))
    live.publish_many("t", [Outgoing(n, key=f"k{n % KEYS}") for n in range(MESSAGES)])
    book = Book()
    with far_from(database_url, door) as (far, proxy):
        cut_off = start("t", "g", book.handler("far"), on=far, concurrency=KEYS, max_messages=MESSAGES)
        wait_for(lambda: len(book.begun) >= 2 * KEYS, "the worker has begun")
        proxy.sever()
        cut_at = elapsed()
        near = start("t", "g", book.handler("near"), concurrency=KEYS, max_messages=MESSAGES)
        wait_for(lambda: len(book.of("near")) >= 20 * KEYS, "the other worker has taken over")
        # the last lease or extension was asked for before the cut
        assert [one for one in book.of("far") if one.at >= cut_at + VISIBILITY] == []
        first = {key: min(one.at for one in book.of("near") if one.key == key) for key in {b.key for b in book.begun}}
        assert [one for one in book.of("far") if one.at > first[one.key]] == [], "two workers had one key"
        proxy.mend()
        wait_for(lambda: live.stats("t", "g").depth == 0, "all messages are resolved", timeout=60)
        near.stop()
        summary = cut_off.stop()
    assert {one.offset for one in book.begun} == set(range(MESSAGES))
    # what had run before the lease was over was refused; what was not begun is no outcome
    assert summary.lost <= len(book.of("far"))
    assert live.stats("t", "g").dead == 0


@pytest.mark.chaos
@pytest.mark.req("X2")
def test_a_worker_that_was_stopped_for_longer_than_its_lease_begins_nothing_of_it(
    live: custody.Custody, database_url: str, db: psycopg.Connection, start: Start
) -> None:
    live.create_topic("t")
    live.create_group("t", "g", Policy(ordering="key", visibility_timeout=VISIBILITY))
    live.publish_many("t", [Outgoing(n, key=f"k{n % KEYS}") for n in range(MESSAGES)])
    db.execute('CREATE TABLE begun (at double precision, key text, "offset" bigint)')
    script = Path(__file__).parent / "noting_worker.py"
    with subprocess.Popen([sys.executable, script, database_url, str(KEYS), str(MESSAGES)]) as process:
        try:
            count = lambda: db.execute("SELECT count(*) FROM begun").fetchone()[0]  # noqa: E731
            wait_for(lambda: count() >= 2 * KEYS, "the worker process has begun")
            process.send_signal(signal.SIGSTOP)
            book = Book()
            near = start("t", "g", book.handler("near"), concurrency=KEYS, max_messages=MESSAGES)
            wait_for(lambda: len({one.key for one in book.begun}) == KEYS, "the other worker has every key")
            resumed_at = elapsed()
            process.send_signal(signal.SIGCONT)
            wait_for(lambda: live.stats("t", "g").depth == 0, "all messages are resolved", timeout=60)
            near.stop()
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            process.kill()
    taken = {one.offset: one.at for one in book.begun}
    late = db.execute('SELECT at, "offset" FROM begun WHERE at > %s', [resumed_at]).fetchall()
    assert [offset for _, offset in late if offset in taken] == [], "begun although another worker had it"
    done = {offset for (offset,) in db.execute('SELECT "offset" FROM begun').fetchall()}
    assert done | taken.keys() == set(range(MESSAGES))


@pytest.mark.req("X2")
def test_a_coroutine_that_waited_too_long_for_its_loop_is_not_begun() -> None:
    began: list[int] = []

    async def handler(message: Message) -> None:
        began.append(message.offset)

    caller = HandlerRunner(handler, None, "g")
    try:
        message = Message(
            topic="t", partition=0, offset=7, key=None, payload=None, headers={}, attempt=1, published_at=None
        )
        answers = iter([True, False])  # it held when the call was made, and not any more when the loop came to it
        assert isinstance(caller(message, lambda: next(answers)), NotBegun)
        assert began == []
        assert caller(message, lambda: True) is None
        assert began == [7]
    finally:
        caller.close()


@pytest.mark.req("X2")
def test_what_is_not_begun_on_a_lease_that_still_holds_is_given_back_uncharged(
    live: custody.Custody, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its own clock the worker is late, and the database does not think so: the release counts."""
    live.create_topic("t")
    live.create_group("t", "g", Policy(visibility_timeout="60s"))
    live.publish_many("t", list(range(20)))
    attempts: list[int] = []
    over = iter([True] * 3)
    monkeypatch.setattr(
        "custody.worker.loop.holds_until",
        lambda sent, visibility: sent - 1 if next(over, False) else holds_until(sent, visibility),
    )
    running = start("t", "g", lambda message: attempts.append(message.attempt), max_messages=20)
    wait_for(lambda: live.stats("t", "g").depth == 0, "all messages are resolved")
    summary = running.stop()
    assert attempts == [1] * 20
    assert (summary.done, summary.released, summary.lost) == (20, 60, 0)
