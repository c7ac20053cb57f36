"""drain: everything that a group has, over all retries, in no real time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest

import custody
from custody import Breaker, Exponential, Outgoing, Policy
from custody.errors import InvalidArgument
from custody.testing import Clock, TestCustody, TestServer, drain, server


@pytest.fixture(scope="module")
def running(server_url: str) -> Iterator[TestServer]:
    with server(server_url) as given:
        yield given


@pytest.fixture
def c(running: TestServer) -> Iterator[TestCustody]:
    with running.custody() as opened:
        opened.create_topic("orders")
        yield opened


@pytest.mark.req("V4", "V12")
def test_retries_and_outcomes_are_played_through_in_no_time(c: TestCustody) -> None:
    c.create_group("orders", "stock", Policy(max_attempts=3, backoff=Exponential("1h", cap="1d")))
    c.publish_many("orders", ["fine", "flaky", "poison", "hopeless", "busy", "cancelled"])
    calls: Counter[str] = Counter()

    def handle(message: custody.Message) -> object:
        calls[message.payload] += 1
        if message.payload == "poison":
            raise ValueError("cannot be read")
        if message.payload == "flaky" and message.attempt < 3:
            raise custody.Retry("not yet", after="10m")
        if message.payload == "hopeless":
            raise custody.Dead("no such customer")
        if message.payload == "busy" and calls["busy"] < 5:
            raise custody.Later("2h")
        return custody.Skip() if message.payload == "cancelled" else None

    summary = drain(c, "orders", "stock", handle)
    assert calls == {"fine": 1, "flaky": 3, "poison": 3, "hopeless": 1, "busy": 5, "cancelled": 1}
    assert (summary.done, summary.failed, summary.dead, summary.later, summary.lost) == (3, 4, 2, 4, 0)
    assert summary.skipped == 1
    assert summary.resolved
    assert summary.reason is None
    assert timedelta(hours=8) <= summary.moved < timedelta(hours=8, seconds=1)
    assert len(summary.messages) == 14
    assert {letter.payload: letter.last_error for letter in c.dead("orders", "stock")} == {
        "poison": "ValueError: cannot be read",
        "hopeless": "no such customer",
    }


@pytest.mark.req("K1", "K2")
def test_a_key_is_handled_in_order_whatever_fails(c: TestCustody) -> None:
    c.create_group("orders", "stock", Policy(ordering="key", max_attempts=5))
    c.publish_many("orders", [Outgoing(n, key=f"k{n % 4}") for n in range(80)])
    done: list[custody.Message] = []

    def handle(message: custody.Message) -> None:
        if message.payload % 7 == 0 and message.attempt < 4:
            raise TimeoutError
        done.append(message)

    assert drain(c, "orders", "stock", handle, max_messages=10).done == 80
    for key in range(4):
        assert [m.payload for m in done if m.key == f"k{key}"] == list(range(key, 80, 4))


@pytest.mark.parametrize("on_dead", ["release", "hold"])
def test_a_dead_message_lets_its_key_go_on_or_holds_it(c: TestCustody, on_dead) -> None:
    c.create_group("orders", "stock", Policy(ordering="key", on_dead=on_dead))
    c.publish_many("orders", [Outgoing(n, key="a") for n in range(3)])

    def handle(message: custody.Message) -> None:
        if message.payload == 0:
            raise custody.Dead("gone")

    summary = drain(c, "orders", "stock", handle)
    if on_dead == "release":
        assert (summary.done, summary.dead, summary.left, summary.reason) == (2, 1, 0, None)
    else:
        assert (summary.done, summary.dead, summary.left, summary.reason) == (0, 1, 3, "held")
        assert not summary.resolved


def test_coroutines_are_handlers_too(c: TestCustody) -> None:
    c.create_group("orders", "stock", Policy(max_attempts=2))
    c.publish_many("orders", [1, 2])

    async def handle(message: custody.Message) -> None:
        if message.attempt == 1:
            raise ValueError

    assert drain(c, "orders", "stock", handle).done == 2


def test_what_is_stuck_is_said_and_never_waited_for(c: TestCustody) -> None:
    c.create_group("orders", "stock", Policy())
    c.publish_many("orders", [1, 2])
    c.pause("orders", "stock", reason="deploy")
    paused = drain(c, "orders", "stock", print)
    assert (paused.left, paused.reason, paused.messages) == (2, "paused", ())
    c.resume("orders", "stock")

    def never(message: custody.Message) -> None:
        raise custody.Later("1s")

    endless = drain(c, "orders", "stock", never, max_deliveries=50)
    assert (endless.left, endless.later, endless.reason) == (2, 50, "max_deliveries")


@pytest.mark.req("N3")
def test_an_open_breaker_is_waited_for_from_probe_to_probe(c: TestCustody) -> None:
    breaker = Breaker(failure_rate=0.5, min_outcomes=5, window="1m", probe_after="30s")
    c.create_group("orders", "stock", Policy(max_attempts=2, backoff=Exponential("1s"), breaker=breaker))
    c.publish_many("orders", list(range(20)))
    up = c.clock.time + timedelta(minutes=2)

    def handle(message: custody.Message) -> None:
        if c.clock.time < up:
            raise TimeoutError("down")

    summary = drain(c, "orders", "stock", handle, max_messages=5)
    assert (summary.done, summary.dead, summary.left, summary.reason) == (20, 0, 0, None)
    assert timedelta(minutes=2) <= summary.moved < timedelta(minutes=3)
    assert len(summary.messages) == 5 + 3 + 20  # a lease that fails, three probes that fail, and all
    assert c.stats("orders", "stock").breaker == "closed"


def test_a_lease_that_was_too_short_counts_as_lost(c: TestCustody) -> None:
    c.create_group("orders", "stock", Policy(visibility_timeout="10s", max_attempts=5))
    c.publish("orders", 1)

    def slow(message: custody.Message) -> None:
        if message.attempt == 1:
            c.clock.move("11s")

    summary = drain(c, "orders", "stock", slow)
    assert (summary.lost, summary.done, summary.left) == (1, 1, 0)


def test_the_clock_stands_still_until_it_is_moved(c: TestCustody) -> None:
    assert c.clock() == c.clock() == datetime(2030, 1, 1, tzinfo=UTC)
    assert c.clock.move("1.5h") == datetime(2030, 1, 1, 1, 30, tzinfo=UTC)
    c.publish("orders", 1)
    assert c.read("orders")[0].published_at == c.clock.time
    with pytest.raises(InvalidArgument, match="zone"):
        Clock(datetime(2030, 1, 1))


def test_the_clock_is_set_to_a_time_and_refuses_what_is_none(c: TestCustody) -> None:
    assert c.clock.set("2026-11-19T10:00+01:00") == c.clock() == datetime(2026, 11, 19, 9, tzinfo=UTC)
    for time in ("noon", "2026-11-19T10:00"):
        with pytest.raises(InvalidArgument, match="2030-01-31T12:00Z"):
            c.clock.set(time)
    assert c.clock() == datetime(2026, 11, 19, 9, tzinfo=UTC)


def test_every_database_is_fresh_and_gone_afterwards(running: TestServer) -> None:
    with running.custody() as one, running.custody() as two:
        one.create_topic("orders")
        assert two.topics() == []
        url = one.database_url
    with pytest.raises(custody.CustodyError):
        custody.connect(url)


@pytest.mark.req("X12")
def test_payloads_are_decoded_for_a_typed_handler(c: TestCustody) -> None:
    @custody.handler(payload=dict[str, int])
    def count(message: custody.Message) -> None:
        assert message.payload["n"] == 1

    c.create_topic("typed")
    c.create_group("typed", "g", custody.Policy(max_attempts=3))
    c.publish_many("typed", [{"n": 1}, {"n": "one"}])
    summary = drain(c, "typed", "g", count)
    assert (summary.done, summary.failed, summary.dead) == (1, 0, 1)
