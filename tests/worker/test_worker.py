"""The worker: both kinds of handlers, all outcomes, time-outs, stops, crashes, and waiting while it cannot work."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, ClassVar, Literal

import psycopg
import pytest
from tests.waiting import wait_for
from tests.worker.conftest import Start

import custody
from custody import Constant, Dead, Later, Outgoing, Policy, Retry, Skip
from custody.errors import InvalidArgument
from custody.store import embedded


def resolved(c: custody.Custody, group: str = "g", topic: str = "t") -> bool:
    return c.stats(topic, group).depth == 0


def prepare(c: custody.Custody, messages: int, policy: Policy | None = None, *, keys: int = 5) -> None:
    c.create_topic("t")
    c.create_group("t", "g", policy or Policy(backoff=Constant("0s")))
    c.publish_many("t", [Outgoing(n, key=f"k{n % keys}") for n in range(messages)])


@pytest.mark.req("V12", "K10")
def test_keys_run_in_parallel_and_one_key_in_order(live: custody.Custody, start: Start) -> None:
    prepare(live, 200, Policy(ordering="key"))
    seen: dict[str | None, list[int]] = {}
    together = threading.Barrier(5)  # only passes if five keys are in handlers at the same time
    guard = threading.Lock()

    def handler(message: custody.Message) -> None:
        if message.payload < 5:
            together.wait(20)
        with guard:
            seen.setdefault(message.key, []).append(message.payload)

    running = start("t", "g", handler, concurrency=5)
    wait_for(lambda: resolved(live), "all 200 messages are resolved")
    assert running.stop().done == 200
    assert all(numbers == sorted(numbers) for numbers in seen.values())


@pytest.mark.req("V12")
def test_a_coroutine_function_is_a_handler_too(live: custody.Custody, start: Start) -> None:
    prepare(live, 50)
    seen: list[int] = []
    at_once = 0
    most = 0

    async def handler(message: custody.Message) -> None:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await asyncio.sleep(0.01)
        at_once -= 1
        seen.append(message.payload)

    running = start("t", "g", handler, concurrency=10)
    wait_for(lambda: resolved(live), "all 50 messages are resolved")
    assert running.stop().done == 50
    assert sorted(seen) == list(range(50))
    assert most > 1


@pytest.mark.req("V12")
def test_every_outcome_of_a_handler(live: custody.Custody, start: Start) -> None:
    prepare(live, 7)
    tries: dict[int, int] = {}

    def handler(message: custody.Message) -> object:
        count = tries[message.payload] = tries.get(message.payload, 0) + 1
        if message.payload == 1 and count == 1:
            raise ValueError("once")
        if message.payload == 2:
            raise Dead("no such customer")
        if message.payload == 3 and count <= 5:
            raise Later("10ms")
        if message.payload == 4:
            raise Retry("again", after="1ms")
        if message.payload == 5:
            raise Skip("cancelled")
        return Skip("cancelled, too") if message.payload == 6 else None

    running = start("t", "g", handler, concurrency=2)
    wait_for(lambda: resolved(live), "every message is resolved")
    summary = running.stop()
    assert (summary.done, summary.failed, summary.dead, summary.later, summary.skipped) == (3, 4, 2, 5, 2)
    assert [live.trace("t", 0, offset)[-1].error for offset in (5, 6)] == ["cancelled", "cancelled, too"]
    letters = {letter.payload: letter for letter in live.dead("t", "g")}
    assert letters[2].reason == "terminal"
    assert letters[2].last_error == "no such customer"
    assert letters[4].reason == "max_retries_exceeded"
    assert letters[4].attempts == 3
    assert tries == {0: 1, 1: 2, 2: 1, 3: 6, 4: 3, 5: 1, 6: 1}


@pytest.mark.req("V12")
@pytest.mark.parametrize("on_dead", ["release", "hold"])
def test_a_key_goes_on_after_its_dead_message_only_if_the_policy_says_so(
    live: custody.Custody, start: Start, on_dead: Literal["release", "hold"]
) -> None:
    prepare(live, 30, Policy(ordering="key", on_dead=on_dead))
    seen: list[int] = []

    def handler(message: custody.Message) -> None:
        if message.payload == 7:  # of key k2, as 12, 17, 22 and 27
            raise Dead("no such customer")
        seen.append(message.payload)

    running = start("t", "g", handler, concurrency=3)
    left = 0 if on_dead == "release" else 5
    wait_for(lambda: live.stats("t", "g").depth == left, f"all but {left} messages are resolved")
    assert running.stop().done == (29 if on_dead == "release" else 25)
    assert live.stats("t", "g").in_flight == 0
    assert {12, 17, 22, 27} <= set(seen) if on_dead == "release" else not {12, 17, 22, 27} & set(seen)


@pytest.mark.req("G7")
def test_leases_are_extended_while_handlers_run(live: custody.Custody, start: Start) -> None:
    prepare(live, 3, Policy(visibility_timeout="300ms"))
    attempts: list[int] = []

    def handler(message: custody.Message) -> None:
        attempts.append(message.attempt)
        threading.Event().wait(0.9)

    running = start("t", "g", handler, concurrency=1)
    wait_for(lambda: resolved(live), "the three slow messages are resolved")
    assert running.stop().lost == 0
    assert attempts == [1, 1, 1]


@pytest.mark.req("G7")
@pytest.mark.parametrize("kind", ["def", "async"])
def test_a_handler_that_takes_too_long_is_a_failure_and_others_go_on(
    live: custody.Custody, start: Start, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    prepare(live, 20, Policy(max_attempts=1, handler_timeout="300ms", visibility_timeout="2s"))
    let_go = threading.Event()

    def stuck(message: custody.Message) -> None:
        if message.payload == 0:
            let_go.wait(30)

    async def stuck_async(message: custody.Message) -> None:
        if message.payload == 0:
            await asyncio.sleep(30)

    running = start("t", "g", stuck if kind == "def" else stuck_async, concurrency=1)
    wait_for(lambda: resolved(live), "the others are done and the stuck one is dead")
    let_go.set()
    summary = running.stop()
    assert (summary.done, summary.dead) == (19, 1)
    (letter,) = live.dead("t", "g")
    assert letter.payload == 0
    assert "took longer than 0.3 s" in (letter.last_error or "")
    if kind == "def":
        assert "is abandoned" in caplog.text


@pytest.mark.req("V5")
def test_a_stop_finishes_what_runs_and_gives_back_the_rest(live: custody.Custody, start: Start) -> None:
    prepare(live, 100, Policy(ordering="key"), keys=100)
    began = threading.Event()
    finish = threading.Event()
    seen: list[int] = []

    def handler(message: custody.Message) -> None:
        began.set()
        finish.wait(20)
        seen.append(message.payload)

    running = start("t", "g", handler, concurrency=2, max_messages=50)
    assert began.wait(20), "no handler began within 20 s"
    running.worker.stop()
    finish.set()
    summary = running.stop()
    stats = live.stats("t", "g")
    assert summary.done == len(seen) <= 2
    assert stats.in_flight == 0
    assert stats.depth == 100 - len(seen)
    lease = live.claim("t", "g", max_messages=100)
    assert {message.attempt for message in lease} == {1}, "a release does not count as a delivery"


@pytest.mark.req("N3")
def test_it_waits_while_the_group_is_paused_and_says_why(live: custody.Custody, start: Start) -> None:
    prepare(live, 3)
    live.pause("t", "g", reason="deploy")
    running = start("t", "g", lambda _: None, poll="50ms")
    wait_for(lambda: running.worker.waiting_for == "paused: deploy", "the worker says that it is paused")
    live.resume("t", "g")
    wait_for(lambda: resolved(live), "it goes on after the resume")


@pytest.mark.req("C6")
def test_it_waits_at_a_cap_and_goes_on(live: custody.Custody, start: Start) -> None:
    prepare(live, 30, Policy(max_in_flight=1))
    held = live.claim("t", "g")
    running = start("t", "g", lambda _: None, poll="50ms")
    wait_for(lambda: running.worker.waiting_for == "max_in_flight", "the worker says which cap it waits at")
    held.ack()
    wait_for(lambda: resolved(live), "it goes on below the cap")


@pytest.mark.req("V12")
@pytest.mark.parametrize("kind", ["def", "async"])
def test_nothing_that_a_handler_raises_ends_the_worker(live: custody.Custody, start: Start, kind: str) -> None:
    prepare(live, 20, Policy(max_attempts=1))

    def leave(message: custody.Message) -> None:
        if message.payload % 4 == 0:
            sys.exit(3)

    async def leave_async(message: custody.Message) -> None:
        leave(message)

    running = start("t", "g", leave if kind == "def" else leave_async, concurrency=2)
    wait_for(lambda: resolved(live), "every message is resolved, though some handlers called sys.exit")
    assert (running.stop().done, live.stats("t", "g").dead) == (15, 5)
    assert live.dead("t", "g")[0].last_error == "SystemExit: 3"


@pytest.mark.req("V9")
def test_it_goes_on_after_it_has_lost_its_lease(live: custody.Custody, start: Start) -> None:
    """A rewind revokes the lease in the middle of a batch of an ordered group: what is in hand is let go of."""
    prepare(live, 40, Policy(ordering="key", visibility_timeout="600ms"))
    began, go_on = threading.Event(), threading.Event()
    seen: list[int] = []

    def handler(message: custody.Message) -> None:
        began.set()
        go_on.wait(20)
        seen.append(message.payload)

    running = start("t", "g", handler, concurrency=1, poll="50ms")
    assert began.wait(20), "no handler began within 20 s"
    live.rewind("t", "g", to_offset=0)
    go_on.set()
    wait_for(lambda: resolved(live), "everything is resolved in spite of the revoked lease")
    summary = running.stop()
    assert summary.lost >= 1
    assert set(seen) == set(range(40))


@pytest.mark.chaos
def test_it_stops_in_time_while_the_database_is_down(base: Path) -> None:
    home = base / "home"
    with custody.connect(home=home) as c:
        prepare(c, 50, Policy(visibility_timeout="2s"))
        began, go_on = threading.Event(), threading.Event()

        def handler(_: custody.Message) -> None:
            began.set()
            go_on.wait(20)

        worker = c.worker_for("t", "g", handler, concurrency=2, grace="3s")
        thread = threading.Thread(target=worker.run)
        thread.start()
        assert began.wait(20), "no handler began within 20 s"
        embedded.stop(home, mode="immediate")
        worker.stop()
        go_on.set()
        thread.join(20)
        assert not thread.is_alive(), "the worker still waits for the database"
        embedded.acquire(home).close()


def test_an_error_that_no_retry_will_mend_ends_the_work_and_is_raised(live: custody.Custody, database_url: str) -> None:
    prepare(live, 10)

    def handler(_: custody.Message) -> None:
        with psycopg.connect(database_url, autocommit=True) as connection:
            connection.execute("ALTER TABLE custody.journal ADD CONSTRAINT broken CHECK (entry < 0) NOT VALID")

    worker = live.worker_for("t", "g", handler, concurrency=1, max_messages=1, grace="1s")
    with pytest.raises(custody.CustodyError, match="broken"):
        worker.run()


WORKER = """
import sys, threading, custody
url, slow = sys.argv[1], float(sys.argv[2])
def handler(message):
    print(message.payload, flush=True)
    threading.Event().wait(slow)
with custody.connect(url) as c:
    print(c.work("t", "g", handler, concurrency=4, max_messages=20), file=sys.stderr)
"""


def spawn(url: str, slow: float) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WORKER, url, str(slow)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.req("V5")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_it_gracefully(live: custody.Custody, number: signal.Signals) -> None:
    prepare(live, 200)
    process = spawn(live.database_url, 0.05)
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(number)
    _, summary = process.communicate(timeout=30)
    assert process.returncode == 0, summary
    assert "lost=0" in summary
    stats = live.stats("t", "g")
    assert stats.in_flight == 0
    assert 0 < stats.depth < 200


@pytest.mark.chaos
@pytest.mark.req("V5", "C3")
def test_a_killed_worker_costs_the_visibility_timeout_and_nothing_else(live: custody.Custody, start: Start) -> None:
    prepare(live, 60, Policy(visibility_timeout="1s", max_attempts=2))
    process = spawn(live.database_url, 0.02)
    assert process.stdout is not None
    process.stdout.readline()
    process.kill()
    process.communicate(timeout=30)
    again: list[int] = []
    start("t", "g", lambda message: again.append(message.attempt))
    wait_for(lambda: resolved(live), "another worker takes over what the killed one held")
    assert live.stats("t", "g").dead == 0
    assert max(again) >= 2


@pytest.mark.chaos
@pytest.mark.req("V5")
def test_it_survives_a_crash_of_the_database(base: Path) -> None:
    home = base / "home"
    with custody.connect(home=home) as c:
        prepare(c, 300, Policy(visibility_timeout="3s"))
        seen: set[int] = set()
        half = threading.Event()

        def handler(message: custody.Message) -> None:
            seen.add(message.payload)
            threading.Event().wait(0.005)
            if len(seen) > 100:
                half.set()

        worker = c.worker_for("t", "g", handler, concurrency=4, max_messages=20)
        thread = threading.Thread(target=worker.run)
        thread.start()
        try:
            assert half.wait(30), "the worker did not get going"
            embedded.stop(home, mode="immediate")
            embedded.acquire(home).close()
            wait_for(lambda: resolved(c), "everything is resolved after the restart", timeout=60)
        finally:
            worker.stop()
            thread.join(30)
        assert seen == set(range(300))
        assert c.stats("t", "g").dead == 0


@pytest.mark.req("K10")
def test_fifty_workers_keep_the_order_of_every_key_downstream(live: custody.Custody, start: Start) -> None:
    """CREATED → PAID → SHIPPED of each order arrives downstream in that order, though every third try fails."""
    orders = int(os.environ.get("CUSTODY_K10_ORDERS", "60"))
    live.create_topic("orders", partitions=3)
    live.create_topic("shipped", partitions=3)
    live.create_group("orders", "relay", Policy(ordering="key", max_attempts=50, backoff=Constant("1ms")))
    steps = ["CREATED", "PAID", "SHIPPED"]
    live.publish_many(
        "orders", [Outgoing({"order": n, "step": step}, key=f"order-{n}") for step in steps for n in range(orders)]
    )
    tries: dict[tuple[int, str], int] = {}

    def handler(message: custody.Message) -> None:
        at = (message.payload["order"], message.payload["step"])
        tries[at] = tries.get(at, 0) + 1
        if (tries[at] + at[0]) % 3 == 0:
            raise RuntimeError("flaky")
        live.publish("shipped", message.payload, key=message.key)

    for _ in range(50):
        start("orders", "relay", handler, concurrency=1, max_messages=5, poll="100ms")
    wait_for(lambda: resolved(live, "relay", "orders"), "all orders are resolved", timeout=90)
    arrived: dict[int, list[str]] = {}
    for partition in range(3):
        for message in live.read("shipped", partition, max_messages=10_000):
            arrived.setdefault(message.payload["order"], []).append(message.payload["step"])
    assert arrived == dict.fromkeys(range(orders), steps)


@pytest.mark.req("V12")
def test_it_does_not_spin_while_somebody_holds_an_expired_lease(
    live: custody.Custody, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(live, 1)
    claims = []
    claim = custody.Custody.claim

    def counted(*arguments: Any, **options: Any) -> Any:
        claims.append(time.monotonic())
        return claim(*arguments, **options)

    live.claim("t", "g", visibility_timeout="50ms")
    with psycopg.connect(live.database_url) as other:
        other.execute("SELECT FROM custody.leases FOR UPDATE")
        monkeypatch.setattr(custody.Custody, "claim", counted)
        running = start("t", "g", lambda _: None)
        until = time.monotonic() + 2.0
        wait_for(lambda: time.monotonic() > until, "time passes")
        assert 2 <= len(claims) <= 20
    wait_for(lambda: resolved(live), "the message is handled when the lease is let go")
    assert running.stop().done == 1


@pytest.mark.req("X1", "V9")
def test_a_rewind_of_a_part_of_its_lease_takes_only_that_part(live: custody.Custody, start: Start) -> None:
    """The keeper hears of it: what is left is done, and what was taken away is begun by nobody on the old lease."""
    live.create_topic("orders")
    live.create_group("orders", "stock", custody.Policy(visibility_timeout="1s"))
    live.publish_many("orders", range(6))
    begun: list[tuple[int, int]] = []
    rewound, go_on = threading.Event(), threading.Event()

    def handle(message: custody.Message) -> None:
        begun.append((message.offset, message.attempt))
        if message.offset == 0 and not rewound.is_set():
            live.rewind("orders", "stock", to_offset=3)
            rewound.set()
            assert go_on.wait(30), "nobody has extended the lease"

    running = start("orders", "stock", handle, concurrency=1, max_messages=6)
    assert rewound.wait(30)
    wait_for(lambda: live.trace("orders", 0, 0)[-1].kind == "extend", "the lease is not extended")
    wait_for(lambda: all(len(lease.open) < 6 for lease in list(running.worker._leases)), "the loss is not noticed")
    go_on.set()
    wait_for(lambda: live.stats("orders", "stock").depth == 0, "not everything is done")
    summary = running.stop()
    assert sorted(begun) == [(offset, 1) for offset in range(6)]
    assert (summary.done, summary.lost) == (6, 0)


@pytest.mark.req("V12")
@pytest.mark.parametrize("timeout", [0, "0s", "0.1ms"])
def test_a_visibility_timeout_of_nothing_is_refused(live: custody.Custody, timeout: Any) -> None:
    prepare(live, 0)
    with pytest.raises(InvalidArgument, match=r"visibility_timeout cannot be .* at least a millisecond"):
        live.worker_for("t", "g", print, visibility_timeout=timeout)


@pytest.mark.req("V12")
def test_a_handler_that_would_never_run_is_refused_and_its_message_is_not_done(
    live: custody.Custody, start: Start
) -> None:
    def generating(_message: custody.Message) -> Any:
        yield 1

    async def awaiting(_message: custody.Message) -> None: ...

    class Awaiting:
        seen: ClassVar[list[Any]] = []

        async def __call__(self, message: custody.Message) -> None:
            self.seen.append(message.payload)

    prepare(live, 3, Policy(max_attempts=1))
    with pytest.raises(InvalidArgument, match="a yield"):
        live.worker_for("t", "g", generating)
    start("t", "g", lambda message: awaiting(message) if message.payload else generating(message))
    wait_for(lambda: live.stats("t", "g").dead == 3, "the messages to fail")
    errors = {letter.payload: letter.last_error or "" for letter in live.dead("t", "g")}
    assert "returned a generator" in errors[0]
    assert "returned a coroutine" in errors[1]
    live.create_group("t", "h", Policy())
    start("t", "h", Awaiting())
    wait_for(lambda: resolved(live, "h"), "an object that can be awaited to be called")
    assert sorted(Awaiting.seen) == [0, 1, 2]
