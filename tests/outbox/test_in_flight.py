"""The batches that a relay has in hand: none holds up another, and what was published is settled if it can be."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from tests.conftest import Clock
from tests.outbox.conftest import Collector
from tests.waiting import wait_for

import custody
from custody.errors import PublisherUnavailable, PublishFailed
from custody.outbox import EventState, Outbox
from custody.relay import ClaimedEvent, Publisher, Relay
from custody.relay.claims import OutboxClaims

pytestmark = pytest.mark.core


@pytest.fixture
def write(alone_url: str) -> Callable[..., list[Any]]:
    """Writes events, committed."""

    def write(*payloads: Any, key: str | None = None, to: str = "test:") -> list[Any]:
        with psycopg.connect(alone_url) as mine:
            return [
                custody.outbox.write(mine, event_type="e", payload=payload, destination=to, ordering_key=key)
                for payload in payloads
            ]

    return write


@pytest.fixture
def events(alone_url: str) -> Iterator[Callable[[], dict[Any, tuple[EventState, int]]]]:
    """payload → its status and attempts."""
    with Outbox(alone_url) as outbox:
        yield lambda: {event.payload: (event.status, event.attempts) for event in outbox.events()}


@contextmanager
def running(relay: Relay) -> Iterator[Relay]:
    thread = threading.Thread(target=relay.run, daemon=True)
    thread.start()
    try:
        yield relay
    finally:
        relay.stop()
        thread.join(30)
        assert not thread.is_alive()


class Hanging(Publisher):
    """Takes what comes, and hangs until it is let go: then its destination is down."""

    def __init__(self) -> None:
        self.entered, self.leave = threading.Semaphore(0), threading.Event()

    def publish(self, event: ClaimedEvent) -> None:
        self.entered.release()
        self.leave.wait(30)
        raise PublisherUnavailable("no route to host")


PUBLISHED = (EventState.PUBLISHED, 0)


@pytest.mark.req("O12")
@pytest.mark.parametrize("concurrency", [1, 2])
def test_many_destinations_that_hang_leave_threads_to_the_others(
    alone_url: str, write: Any, events: Any, collector: Collector, concurrency: int
) -> None:
    hanging, many = Hanging(), 10
    for n in range(many):
        write(*range(100 * n + 100, 100 * n + 105), to=f"hanging:{n}")
    relay = Relay(alone_url, {"hanging": hanging, "test": collector}, batch=100, poll="10ms", concurrency=concurrency)
    try:
        with running(relay):
            for _ in range(many):
                assert hanging.entered.acquire(timeout=20)
            write(*range(10))
            wait_for(lambda: all(events()[n] == PUBLISHED for n in range(10)), lambda: str(events()))
            assert not hanging.entered.acquire(blocking=False), "one has two threads, and has answered nothing"
            hanging.leave.set()
    finally:
        hanging.leave.set()


@pytest.mark.req("O12")
@pytest.mark.parametrize("key", [None, "k"])
def test_a_destination_that_hangs_holds_up_no_other(
    alone_url: str, write: Any, events: Any, collector: Collector, key: str | None
) -> None:
    hanging = Hanging()
    write(*range(100, 120), to="hanging:", key=key)
    relay = Relay(alone_url, {"hanging": hanging, "test": collector}, batch=10, poll="10ms", concurrency=2)
    try:
        with running(relay):
            assert hanging.entered.acquire(timeout=20)
            for n in range(30):
                write(n)
                wait_for(lambda n=n: events()[n] == PUBLISHED, "it waits for another destination")  # type: ignore[misc]
            assert (EventState.PENDING, 0) in {events()[n] for n in range(100, 120)}, "all was claimed for what hangs"
            hanging.leave.set()
    finally:
        hanging.leave.set()
    assert {attempts for _, attempts in events().values()} == {0, 1}, "more were tried than there was room for"
    assert {events()[n][0] for n in range(100, 120)} == {EventState.PENDING}


@pytest.mark.req("O12")
def test_probes_that_hang_hold_up_no_other_destination(
    alone_url: str, write: Any, events: Any, collector: Collector
) -> None:
    hanging = Hanging()
    for n in range(3):
        write(100 + n, to=f"hanging:{n}")
    relay = Relay(alone_url, {"hanging": hanging, "test": collector}, poll="10ms")
    for n in range(3):
        relay.outages.failed(f"hanging:{n}")
    try:
        with running(relay):
            for _ in range(3):
                assert hanging.entered.acquire(timeout=20)
            write(1)
            wait_for(lambda: events()[1] == PUBLISHED, "it waits for the probes")
            assert not hanging.entered.acquire(blocking=False), "more than one event was tried"
            hanging.leave.set()
    finally:
        hanging.leave.set()


@pytest.mark.req("O12")
def test_any_number_of_destinations_that_hang_when_they_are_tried_leave_threads_to_the_others(
    alone_url: str, write: Any, events: Any, collector: Collector
) -> None:
    hanging = Hanging()
    relay = Relay(alone_url, {"hanging": hanging, "test": collector}, poll="10ms", concurrency=2)
    for n in range(20):
        write(100 + n, to=f"hanging:{n}")
        relay.outages.failed(f"hanging:{n}")
    try:
        with running(relay):
            for _ in range(2):
                assert hanging.entered.acquire(timeout=20)
            write(1)
            wait_for(lambda: events()[1] == PUBLISHED, "the probes have all threads")
            hanging.leave.set()
    finally:
        hanging.leave.set()


@pytest.mark.req("O10")
def test_a_long_track_leaves_the_other_keys_of_its_destination_alone(alone_url: str, write: Any, events: Any) -> None:
    leave = threading.Event()
    write(1, 2, 3, key="long")

    def publish(event: ClaimedEvent) -> None:
        if event.payload == 1:
            assert leave.wait(30)

    try:
        with running(Relay(alone_url, {"test": publish}, batch=3, poll="10ms")):
            wait_for(lambda: events()[1][0] is EventState.CLAIMED, "it is not claimed")
            write(4, key="other")
            wait_for(lambda: events()[4] == PUBLISHED, "it waits for another key")
            leave.set()
            wait_for(lambda: set(events().values()) == {PUBLISHED}, "not all was published")
    finally:
        leave.set()


@pytest.mark.req("O8")
def test_a_relay_that_ends_by_an_error_begins_nothing_more_and_settles_what_it_has(
    alone_url: str, write: Any, events: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(*range(5), key="k")
    entered, leave = threading.Event(), threading.Event()

    def publish(event: ClaimedEvent) -> None:
        entered.set()
        assert leave.wait(20)

    def fails(*_: Any) -> None:
        leave.set()
        raise RuntimeError("out of memory")

    relay = Relay(alone_url, {"test": publish}, lease="400ms", poll="10ms")
    monkeypatch.setattr(OutboxClaims, "extend", fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        relay.run()
    assert events() == {0: PUBLISHED, **dict.fromkeys(range(1, 5), (EventState.PENDING, 0))}


@pytest.mark.req("O8")
def test_an_event_that_cannot_be_settled_costs_the_others_nothing(
    alone_url: str, write: Any, events: Any, collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    write(*range(4))
    with psycopg.connect(alone_url, autocommit=True) as mine:
        mine.execute(
            "CREATE FUNCTION public.refuses() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
            "IF NEW.payload = '2' AND NEW.status = 'PUBLISHED' THEN RAISE 'not this one'; END IF; RETURN NEW; END $$"
        )
        mine.execute(
            "CREATE TRIGGER refuses BEFORE UPDATE ON custody.outbox FOR EACH ROW EXECUTE FUNCTION public.refuses()"
        )
    relay = Relay(alone_url, {"test": collector})
    relay.run_once()
    relay.close()
    assert events() == {0: PUBLISHED, 1: PUBLISHED, 2: (EventState.CLAIMED, 0), 3: PUBLISHED}
    assert (relay.summary.published, relay.summary.lost) == (3, 1)
    assert "not this one" in caplog.text


@pytest.mark.req("O7", "O8")
def test_what_an_operator_has_locked_is_settled_when_it_is_free(
    alone_url: str, write: Any, events: Any, collector: Collector
) -> None:
    """The operator looks at it for longer than the lease of the others lasts; those are settled at once."""
    write(*range(4))
    with psycopg.connect(alone_url) as operator:

        def publish(event: ClaimedEvent) -> None:
            if event.payload == 3:
                operator.execute("SELECT FROM custody.outbox WHERE payload = '3' FOR UPDATE")
            collector.publish(event)

        with running(Relay(alone_url, {"test": publish}, lease="10s", poll="10ms", concurrency=1)):
            wait_for(
                lambda: [events()[n] for n in range(4)] == [*[PUBLISHED] * 3, (EventState.CLAIMED, 0)],
                "the others are not settled",
            )
            write(4)
            wait_for(lambda: events()[4] == PUBLISHED, "the relay waits for the operator")
            operator.rollback()
            wait_for(lambda: events()[3] == PUBLISHED, "it is not settled")
    assert sorted(collector.payloads) == list(range(5))


@pytest.mark.req("O7", "O8")
def test_a_settle_that_is_given_up_is_tried_again(
    alone_url: str, write: Any, events: Any, collector: Collector
) -> None:
    """The table is locked, and the relay's sessions do not wait for long."""
    write(1)
    release = threading.Event()
    with psycopg.connect(alone_url) as operator:

        def publish(event: ClaimedEvent) -> None:
            operator.execute("LOCK TABLE custody.outbox IN SHARE MODE")
            threading.Timer(1.0, operator.rollback).start()
            release.set()
            collector.publish(event)

        url = f"{alone_url}{'&' if '?' in alone_url else '?'}options=-c%20lock_timeout%3D100ms"
        relay = Relay(url, {"test": publish}, poll="10ms")
        assert relay.drain("20s").published == 1
        assert release.is_set()
    assert (events(), relay.summary.lost, collector.payloads) == ({1: PUBLISHED}, 0, [1])


@pytest.mark.req("O7")
def test_an_event_that_is_killed_costs_the_rest_of_its_batch_nothing(alone_url: str, write: Any, events: Any) -> None:
    """The others are kept, for longer than the lease; what was killed before its turn is not begun."""
    ids = write(*range(4), key="a")
    seen: list[int] = []

    def publish(event: ClaimedEvent) -> None:
        if event.payload == 0:
            with Outbox(alone_url) as outbox:
                outbox.kill([ids[3]])
        until = time.monotonic() + 0.4
        wait_for(lambda: time.monotonic() > until, "time stands still")
        seen.append(event.payload)

    relay = Relay(alone_url, {"test": publish}, lease="800ms", poll="10ms")
    assert relay.drain("20s").published == 3
    assert seen == [0, 1, 2]
    assert events() == {0: PUBLISHED, 1: PUBLISHED, 2: PUBLISHED, 3: (EventState.DEAD, 0)}


@pytest.mark.req("O8")
def test_a_drain_ends_when_its_time_is_over(alone_url: str, write: Any, events: Any) -> None:
    write(*range(50))
    never = threading.Event()
    summary = Relay(alone_url, {"test": lambda _: never.wait(0.1)}, batch=5, concurrency=1).drain("1s")
    assert 0 < summary.published < 50
    assert {status for status, _ in events().values()} == {EventState.PUBLISHED, EventState.PENDING}
    assert {attempts for _, attempts in events().values()} == {0}


@pytest.mark.req("O12")
def test_an_event_that_alone_finds_its_destination_down_holds_up_nobody(
    alone_url: str, write: Any, events: Any
) -> None:
    write(*range(5))

    def publish(event: ClaimedEvent) -> None:
        if event.payload == 0:
            raise PublisherUnavailable("502, for this one only")

    relay = Relay(
        alone_url,
        {"test": publish},
        concurrency=1,
        poll="10ms",
        max_attempts=3,
        retry_for="0s",
        backoff=custody.Constant("10ms"),
        outage_backoff=custody.Constant("10ms"),
    )
    with running(relay):
        wait_for(lambda: [events()[n] for n in range(1, 5)] == [PUBLISHED] * 4, lambda: str(events()))
        wait_for(lambda: events()[0][1] > 0, "its failures are not counted while others get through")
        for n in range(5, 20):
            write(n)
            wait_for(lambda n=n: events()[n] == PUBLISHED, lambda: str(events()))  # type: ignore[misc]
            if events()[0][0] is EventState.DEAD:
                break
        wait_for(lambda: events()[0][0] is EventState.DEAD, lambda: str(events()))


@pytest.mark.req("O12")
def test_what_is_tried_in_an_outage_counts_each_attempt_and_does_not_die(
    alone_url: str, write: Any, events: Any
) -> None:
    """Only one event is left: whether it is to blame nobody can know."""
    write(1)

    def publish(_: ClaimedEvent) -> None:
        raise PublisherUnavailable("no route to host")

    relay = Relay(alone_url, {"test": publish}, max_attempts=3, retry_for="0s", outage_backoff=custody.Constant("0s"))
    for _ in range(11):
        relay.run_once()
    relay.close()
    attempts = events()[1][1]
    assert events() == {1: (EventState.PENDING, attempts)}
    assert attempts >= 11


@pytest.mark.req("O6", "O12")
def test_the_last_event_is_charged_for_what_only_it_is_answered(alone_url: str, write: Any, events: Any) -> None:
    write(1)

    def publish(_: ClaimedEvent) -> None:
        raise PublisherUnavailable("503, for this one only", answered=True)

    relay = Relay(
        alone_url,
        {"test": publish},
        max_attempts=10,
        retry_for="0s",
        backoff=custody.Constant("0s"),
        outage_backoff=custody.Constant("0s"),
    )
    for _ in range(40):
        relay.run_once()
        if events()[1][0] is EventState.DEAD:
            break
    relay.close()
    assert events()[1][0] is EventState.DEAD
    assert events()[1][1] >= 10


class Silent(Publisher):
    """A service that accepts requests and answers none, or only some."""

    def __init__(self) -> None:
        self.answering: set[int] = set()
        self.calls = 0

    def publish(self, event: ClaimedEvent) -> None:
        self.calls += 1
        if event.payload not in self.answering:
            try:
                raise TimeoutError("timed out")
            except TimeoutError as error:
                raise PublishFailed("it gave no answer") from error


@pytest.mark.req("O12")
def test_a_service_that_gives_no_answer_at_all_is_down(alone_url: str, write: Any, events: Any) -> None:
    write(*range(10))
    silent = Silent()
    relay = Relay(alone_url, {"test": silent}, concurrency=1, outage_backoff=custody.Constant("1h"))
    relay.run_once()
    assert relay.outages.down == ["test:"]
    assert silent.calls == 1
    relay.close()
    assert sorted(events().values()) == [(EventState.PENDING, 0)] * 9 + [(EventState.PENDING, 1)]


@pytest.mark.req("O12", "O5")
def test_an_event_that_alone_gets_no_answer_is_charged(alone_url: str, write: Any, events: Any) -> None:
    write(*range(4))
    silent = Silent()
    silent.answering = {0, 1, 3}
    relay = Relay(alone_url, {"test": silent}, concurrency=1)
    relay.run_once()
    relay.close()
    assert relay.outages.down == []
    assert events() == {0: PUBLISHED, 1: PUBLISHED, 2: (EventState.PENDING, 1), 3: PUBLISHED}


class Counting(Publisher):
    """Says with how many others an event was under way."""

    def __init__(self) -> None:
        self._guard, self._wait = threading.Lock(), threading.Event()
        self._active: set[int] = set()
        self.with_others: dict[int, int] = {}

    def publish(self, event: ClaimedEvent) -> None:
        with self._guard:
            self._active.add(event.id)
            for each in self._active:
                self.with_others[each] = max(self.with_others.get(each, 0), len(self._active) - 1)
        self._wait.wait(0.05)  # the work of a publisher takes a while
        with self._guard:
            self._active.discard(event.id)


@pytest.mark.req("X4")
def test_what_may_have_killed_a_relay_is_published_with_nothing_beside_it(
    alone_url: str, write: Any, clock: Clock
) -> None:
    """Else a slow and innocent event could be charged as often as one that kills its relays."""
    write(1, 2)
    with psycopg.connect(alone_url) as other:
        claim = "SELECT id FROM custody.outbox_claim('dead', 10, '30 s', 3, p_now => %s) WHERE id IS NOT NULL"
        suspects = {id for (id,) in other.execute(claim, [clock()]).fetchall()}
    assert len(suspects) == 2
    clock.move(31)
    write(*range(3, 40))
    publisher = Counting()
    relay = Relay(alone_url, {"test": publisher}, batch=4, clock=clock, poll="10ms")
    assert relay.drain("60s").published == 39
    assert {id for id, others in publisher.with_others.items() if others == 0} >= suspects
    assert max(publisher.with_others.values()) > 0, "nothing was published side by side"
