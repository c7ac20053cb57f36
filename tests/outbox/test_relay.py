"""The relay: claims, publishes, settles; what it does when something fails."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from tests.conftest import Clock
from tests.outbox.conftest import Collector, rounds
from tests.waiting import wait_for

import custody
from custody.errors import InvalidArgument, PublisherUnavailable, PublishRefused, SchemaMissing
from custody.outbox import EventState, Outbox
from custody.relay import ClaimedEvent, Publisher, Relay, loop
from custody.relay.batch import Batch
from custody.relay.in_flight import InFlightBatches
from custody.store.postgres import run_function

pytestmark = pytest.mark.core


@pytest.fixture
def write(mine: psycopg.Connection[Any], clock: Clock) -> Any:
    """Writes events at the test's time, committed."""

    def write(*payloads: Any, key: str | None = None, destination: str = "test:") -> list[Any]:
        written = [
            mine.execute(
                "SELECT custody.outbox_add('e', 'j', %s, %s, p_ordering_key => %s, p_now => %s)",
                [str(payload).encode(), destination, key, clock()],
            ).fetchone()[0]  # type: ignore[index]
            for payload in payloads
        ]
        mine.commit()
        return written

    return write


@pytest.mark.req("O4", "O9")
def test_events_are_published_and_say_so(relay: Relay, collector: Collector, outbox: Outbox, write: Any) -> None:
    ids = write(1, 2, 3)
    rounds(relay)
    assert sorted(collector.payloads) == [1, 2, 3]
    assert [event.event_id for event in sorted(collector.events, key=lambda event: event.id)] == ids
    found = outbox.events()
    assert {event.status for event in found} == {EventState.PUBLISHED}
    assert {event.attempts for event in found} == {0}
    assert all(event.published_at for event in found)
    assert relay.summary.published == 3


@pytest.mark.req("O5", "O6")
def test_a_failure_is_tried_again_after_its_backoff_and_dead_at_the_limit(
    relay: Relay, collector: Collector, outbox: Outbox, write: Any, clock: Clock
) -> None:
    (event_id,) = write(1)
    collector.failing[1] = RuntimeError("no")
    for attempt in (1, 2):
        assert relay.run_once() == 1
        event = outbox.event(event_id)
        assert (event.status, event.attempts, event.last_error) == (EventState.PENDING, attempt, "RuntimeError: no")
        assert event.available_at == clock() + timedelta(seconds=10)
        assert relay.run_once() == 0, "it was tried before its time"
        clock.move(10)
    assert relay.run_once() == 1
    event = outbox.event(event_id)
    assert (event.status, event.attempts, event.claimed_by) == (EventState.DEAD, 3, None)
    clock.move(3600)
    assert relay.run_once() == 0
    assert len(collector.calls) == 3
    assert (relay.summary.failed, relay.summary.dead) == (2, 1)


@pytest.mark.req("O6")
def test_an_event_that_fails_is_dead_when_its_attempts_and_its_time_are_used_up(
    outbox_url: str, collector: Collector, outbox: Outbox, mine: psycopg.Connection[Any], clock: Clock
) -> None:
    written = {"event_type": "e", "kind": "j", "payload": b"1", "destination": "test:", "now": clock()}
    run_function(mine, "outbox_add", written)
    mine.commit()
    collector.failing[1] = RuntimeError("no")
    relay = Relay(outbox_url, {"test": collector}, max_attempts=2, backoff=custody.Constant("10s"), clock=clock)

    def tried(after: float) -> tuple[EventState, int]:
        clock.move(after)
        assert relay.run_once() == 1
        (event,) = outbox.events()
        return event.status, event.attempts

    assert tried(24 * 3600) == (EventState.PENDING, 1), "a day, but one attempt"
    outbox.kill([event.event_id for event in outbox.events()])
    with Outbox(outbox_url, clock=clock) as operator:
        operator.replay()
    assert [tried(10), tried(10), tried(10)] == [(EventState.PENDING, n) for n in (1, 2, 3)], "attempts, but no day"
    assert tried(24 * 3600) == (EventState.DEAD, 4)
    relay.close()


@pytest.mark.req("O6")
def test_a_terminal_error_is_not_tried_again(relay: Relay, collector: Collector, outbox: Outbox, write: Any) -> None:
    (event_id,) = write(1)
    collector.failing[1] = PublishRefused("never")
    rounds(relay)
    assert outbox.event(event_id).status is EventState.DEAD
    assert len(collector.calls) == 1


@pytest.mark.req("O10")
def test_a_failure_holds_back_its_key_and_no_other(
    relay: Relay, collector: Collector, write: Any, clock: Clock, outbox: Outbox
) -> None:
    write(1, 2, 3, key="a")
    write(10, 11, key="b")
    write(20)
    collector.failing[2] = RuntimeError("not yet")
    rounds(relay)
    assert [p for p in collector.payloads if p < 10] == [1]
    assert [p for p in collector.payloads if 10 <= p < 20] == [10, 11]
    assert 20 in collector.payloads
    assert [e.attempts for e in outbox.events(ordering_key="a")] == [0, 1, 0]
    collector.failing.clear()
    assert relay.run_once() == 0, "the third overtook the second"
    clock.move(10)
    rounds(relay)
    assert [p for p in collector.payloads if p < 10] == [1, 2, 3]


@pytest.mark.req("O10", "O6")
@pytest.mark.parametrize("batch", [1, 100])
@pytest.mark.parametrize("on_dead", ["release", "hold"])
def test_what_a_dead_event_does_to_its_key(
    outbox_url: str, collector: Collector, write: Any, clock: Clock, on_dead: Any, batch: int
) -> None:
    events = write(1, 2, key="a")
    collector.failing[1] = PublishRefused("never")
    relay = Relay(outbox_url, {"test": collector}, batch=batch, on_dead=on_dead, clock=clock)
    rounds(relay)
    assert collector.payloads == ([2] if on_dead == "release" else [])
    collector.failing.clear()
    with Outbox(outbox_url, clock=clock) as outbox:
        outbox.replay(ids=events[:1], reason="mended")
    rounds(relay)
    assert collector.payloads == ([2, 1] if on_dead == "release" else [1, 2])
    relay.close()


@pytest.mark.req("O12")
def test_while_its_destination_is_down_the_relay_waits_and_nobody_dies_of_it(
    relay: Relay, collector: Collector, outbox: Outbox, write: Any
) -> None:
    write(*range(10), key="a")
    write(*range(10, 20))
    write(99, destination="test:other")
    collector.down = PublisherUnavailable("no route to host")
    rounds_down = 5
    for _ in range(rounds_down):
        relay.run_once()
    assert relay.outages.down == ["test:", "test:other"]
    assert sum(event.attempts for event in outbox.events()) == len(collector.calls), "not every attempt was counted"
    assert {event.status for event in outbox.events()} == {EventState.PENDING}
    assert outbox.events()[0].last_error == "no route to host"
    calls = len(collector.calls)
    relay.run_once()
    assert len(collector.calls) - calls == 2, "more than one event for each destination was tried"
    collector.down = None
    rounds(relay)
    assert relay.outages.down == []
    assert sorted(collector.payloads) == [*range(20), 99]
    assert [p for p in collector.payloads if p < 10] == list(range(10))
    assert sum(event.attempts for event in outbox.events()) == len(collector.calls) - 21


def test_one_destination_that_is_down_leaves_the_others_alone(relay: Relay, write: Any, collector: Collector) -> None:
    write(1, destination="test:down")
    write(2, destination="test:up")
    publish = collector.publish

    def choosy(event: ClaimedEvent) -> None:
        if event.address == "down":
            raise PublisherUnavailable("down")
        publish(event)

    collector.publish = choosy  # type: ignore[method-assign]
    relay.run_once()
    assert collector.payloads == [2]
    write(3, destination="test:up")
    relay.run_once()
    assert collector.payloads == [2, 3]


@pytest.mark.req("O7")
def test_a_relay_that_lost_its_claim_finalises_nothing(
    outbox_url: str, outbox: Outbox, write: Any, clock: Clock
) -> None:
    """While it publishes its lease runs out and another relay takes the event."""
    (event_id,) = write(1)
    second = Collector()
    other = Relay(outbox_url, {"test": second}, name="two", clock=clock)

    class Slow(Publisher):
        def publish(self, event: ClaimedEvent) -> None:
            clock.move(31)
            other.run_once()

    slow = Relay(outbox_url, {"test": Slow()}, name="one", clock=clock)
    slow.run_once()
    assert slow.summary.lost == 1
    assert slow.summary.published == 0
    assert second.payloads == [1]
    event = outbox.event(event_id)
    assert (event.status, event.attempts) == (EventState.PUBLISHED, 1)
    slow.close()
    other.close()


@pytest.mark.req("O8", "O5")
def test_partial_failure_of_a_batch(relay: Relay, collector: Collector, outbox: Outbox, write: Any) -> None:
    write(*range(20))
    collector.failing.update({3: RuntimeError("a"), 7: PublishRefused("b"), 11: PublisherUnavailable("c")})
    relay.run_once()
    states = {event.payload: (event.status, event.attempts) for event in outbox.events()}
    assert states[3] == (EventState.PENDING, 1)
    assert states[7] in ((EventState.DEAD, 1), (EventState.PENDING, 0))  # given back if the outage was noticed before
    assert states[11] == (EventState.PENDING, 1)
    published = [payload for payload, (state, _) in states.items() if state is EventState.PUBLISHED]
    assert sorted(collector.payloads) == sorted(published), "what arrived is not what is settled"
    del collector.failing[11]
    rounds(relay)
    assert [(e.payload, e.attempts) for e in outbox.events(states=["PENDING"])] == [(3, 1)]
    assert [(e.payload, e.attempts) for e in outbox.events(states=["DEAD"])] == [(7, 1)]
    assert sorted(collector.payloads) == [n for n in range(20) if n not in (3, 7)]


class Whole(Collector):
    """Takes all of a batch or nothing."""

    whole_batches = True

    def publish_many(self, events: Any) -> None:
        for event in events:
            if event.payload in self.failing:
                raise self.failing[event.payload]
        self.events += events


@pytest.mark.req("O5", "O10")
def test_of_a_batch_that_fails_as_a_whole_only_the_guilty_are_charged(
    outbox_url: str, outbox: Outbox, write: Any, clock: Clock
) -> None:
    write(1, 2, 3, key="a")
    write(4, 5)
    whole = Whole()
    whole.failing[2] = RuntimeError("bad")
    relay = Relay(outbox_url, {"test": whole}, clock=clock)
    relay.run_once()
    assert sorted(whole.payloads) == [1, 4, 5]
    assert {event.payload: event.attempts for event in outbox.events()} == {1: 0, 2: 1, 3: 0, 4: 0, 5: 0}
    relay.close()


def test_what_no_publisher_serves_is_left_alone_and_said(
    relay: Relay, outbox: Outbox, write: Any, caplog: pytest.LogCaptureFixture
) -> None:
    write(1, destination="kafka:orders")
    write(2, destination="")
    relay.run_once()
    relay._warn_unserved(set())
    assert {event.status for event in outbox.events()} == {EventState.PENDING}
    assert "1 events wait for kafka:orders" in caplog.text
    assert "the default" in caplog.text


def test_a_default_publisher_and_functions(outbox_url: str, write: Any) -> None:
    write(1, destination="")
    seen: list[Any] = []
    relay = Relay(outbox_url, {"": lambda event: seen.append(event.payload)}, clock=lambda: time_of(outbox_url))
    rounds(relay)
    relay.close()
    assert seen == [1]


def time_of(_: str) -> Any:
    from datetime import UTC, datetime

    return datetime(2030, 1, 1, 0, 0, 1, tzinfo=UTC)


@pytest.mark.req("O6")
def test_an_age_limit(outbox_url: str, collector: Collector, outbox: Outbox, write: Any, clock: Clock) -> None:
    (old,) = write(1)
    relay = Relay(outbox_url, {"test": collector}, max_age="1h", clock=clock)
    clock.move(3600)
    write(2)
    rounds(relay)
    assert collector.payloads == [2]
    assert outbox.event(old).status is EventState.DEAD
    relay.close()


@pytest.mark.req("O4", "O10")
def test_several_relays_share_the_events_and_keep_the_order(outbox_url: str, mine: psycopg.Connection[Any]) -> None:
    keys, each = 7, 60
    for n in range(keys * each):
        custody.outbox.write(mine, event_type="e", payload=n, destination="test:", ordering_key=f"k{n % keys}")
    mine.commit()
    collectors = [Collector() for _ in range(3)]
    order: list[int] = []
    guard = threading.Lock()

    def publish(event: ClaimedEvent) -> None:
        with guard:
            order.append(event.payload)

    relays = [Relay(outbox_url, {"test": publish}, batch=20, poll="10ms", name=f"r{n}") for n in range(len(collectors))]
    threads = [threading.Thread(target=relay.drain, args=["60s"]) for relay in relays]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(order) == list(range(keys * each))
    for key in range(keys):
        assert [n for n in order if n % keys == key] == list(range(key, keys * each, keys))


@pytest.mark.req("O8")
def test_a_stop_finishes_what_has_begun_and_gives_back_the_rest(
    outbox_url: str, outbox: Outbox, mine: psycopg.Connection[Any]
) -> None:
    for n in range(5):
        custody.outbox.write(mine, event_type="e", payload=n, destination="test:", ordering_key="k")
    mine.commit()
    entered, leave = threading.Event(), threading.Event()

    def publish(event: ClaimedEvent) -> None:
        entered.set()
        assert leave.wait(20)

    relay = Relay(outbox_url, {"test": publish})
    thread = threading.Thread(target=relay.run)
    thread.start()
    assert entered.wait(20)
    relay.stop()
    leave.set()
    thread.join(20)
    assert not thread.is_alive()
    found = [(e.status, e.attempts) for e in outbox.events()]
    assert found == [(EventState.PUBLISHED, 0)] + [(EventState.PENDING, 0)] * 4
    assert (relay.summary.published, relay.summary.released) == (1, 4)


def test_a_claim_is_kept_while_it_is_worked_on(outbox_url: str, outbox: Outbox, mine: psycopg.Connection[Any]) -> None:
    """A publisher that takes longer than the lease."""
    custody.outbox.write(mine, event_type="e", payload=1, destination="test:")
    mine.commit()
    leave = threading.Event()
    relay = Relay(outbox_url, {"test": lambda _: leave.wait(20)}, lease="3s", poll="10ms")
    thread = threading.Thread(target=relay.run)
    thread.start()
    try:
        wait_for(lambda: outbox.events()[0].status is EventState.CLAIMED, "it is not claimed")
        first = outbox.events()[0]
        wait_for(lambda: outbox.events()[0].expires_at != first.expires_at, "it is not extended")
        second = outbox.events()[0]
        wait_for(lambda: outbox.events()[0].expires_at != second.expires_at, "it is extended only once")
        third = outbox.events()[0]
        assert (third.claimed_at, third.claimed_by, third.attempts) == (first.claimed_at, first.claimed_by, 0)
        assert first.expires_at < second.expires_at < third.expires_at
        leave.set()
        wait_for(lambda: outbox.events()[0].status is EventState.PUBLISHED, "it is not published")
    finally:
        leave.set()
        relay.stop()
        thread.join(20)


@pytest.mark.req("O7", "O8")
def test_a_batch_that_is_stuck_costs_the_next_one_nothing(
    outbox_url: str, outbox: Outbox, mine: psycopg.Connection[Any]
) -> None:
    """What has been published of the second is settled, what has not is kept, and others go on, while the first one
    takes longer than the lease."""
    for n in range(8):
        custody.outbox.write(mine, event_type="e", payload=n, destination="test:")
    mine.commit()
    leave = threading.Event()

    def publish(event: ClaimedEvent) -> None:
        if event.payload in (2, 5):
            assert leave.wait(20)

    relay = Relay(outbox_url, {"test": publish}, batch=2, lease="500ms", poll="10ms")
    thread = threading.Thread(target=relay.run)
    thread.start()
    wait_for(lambda: outbox.events()[7].status is EventState.PUBLISHED, "what was published behind is not settled")
    begun = [event.claimed_at for event in outbox.events()]
    until = time.monotonic() + 1.5
    wait_for(lambda: time.monotonic() > until, "time stands still")
    found = outbox.events()
    assert [event.status.value for event in found] == [
        *["PUBLISHED"] * 2,
        "CLAIMED",
        "PUBLISHED",
        "PUBLISHED",
        "CLAIMED",
        *["PUBLISHED"] * 2,
    ]
    assert [event.claimed_at for event in found] == begun
    leave.set()
    wait_for(lambda: relay.summary.published == 8, lambda: str(relay.summary))
    relay.stop()
    thread.join(20)
    assert (relay.summary.lost, {event.attempts for event in outbox.events()}) == (0, {0})


@pytest.mark.req("O10")
def test_a_batch_that_is_claimed_ahead_overtakes_nothing_of_its_keys(
    outbox_url: str, mine: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the batch ahead always arrives first; what waits for the batch before is not in it, and not forgotten."""
    for n in range(60):
        custody.outbox.write(mine, event_type="e", payload=n, destination="test:", ordering_key="ab"[n % 20 > 15])
    mine.commit()
    seen: list[Any] = []
    allowed: set[int] = set()

    def publish(event: ClaimedEvent) -> None:
        wait_for(lambda: event.id in allowed, "it may not go")
        seen.append((event.ordering_key, event.payload))

    class AheadFirst(InFlightBatches):
        overtaken = 0

        def begin(self, batch: Batch, **given: Any) -> None:
            super().begin(batch, **given)
            if len(self._batches) > 1:
                allowed.update(event.id for event in batch.events)
                payloads = {event.payload for event in batch.events}
                wait_for(lambda: payloads <= {payload for _, payload in seen}, "the batch ahead does not arrive")
                AheadFirst.overtaken += len(payloads)

        def attend(self, seconds: float) -> bool:
            if seconds > 0:
                allowed.update(event.id for batch in self._batches for event in batch.events)
            return super().attend(seconds)

    monkeypatch.setattr(loop, "InFlightBatches", AheadFirst)
    relay = Relay(outbox_url, {"test": publish}, batch=4, poll="10ms")
    assert relay.drain("30s").published == 60
    for key in "ab":
        assert [n for of, n in seen if of == key] == [n for n in range(60) if "ab"[n % 20 > 15] == key]
    assert AheadFirst.overtaken > 0


@pytest.mark.parametrize(
    "wrong",
    [{"batch": 0}, {"max_attempts": 0}, {"on_dead": "nothing"}, {"lease": 0}, {"publishers": {"a:b": print}}],
    ids=str,
)
def test_settings_that_make_no_sense_are_refused(alone_url: str, wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        Relay(alone_url, **wrong)


def test_a_relay_that_finds_no_outbox_leaves_no_connection(bare_url: str, db: psycopg.Connection[Any]) -> None:
    with pytest.raises(SchemaMissing):
        Relay(bare_url)
    open_ = "SELECT count(*) FROM pg_stat_activity WHERE datname = %s"
    name = psycopg.conninfo.conninfo_to_dict(bare_url)["dbname"]
    wait_for(lambda: db.execute(open_, [name]).fetchone() == (0,), "its connections are open")


def test_an_unknown_publisher_is_refused_with_a_suggestion(alone_url: str) -> None:
    with pytest.raises(InvalidArgument, match="stdout"):
        Relay(alone_url, {"test": "stdot"})
