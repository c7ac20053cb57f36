"""Conformance checks O8 to O12: crashes, publishers, order, operators, figures."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import psycopg

from custody.outbox.conformance import LEASE, Trial, must
from custody.outbox.events import EventState


@must(
    "O8.1", "What a relay had claimed, or had published and not settled, when it died is claimed again, the same event"
)
def _crashed(trial: Trial) -> None:
    events = [trial.write() for _ in range(3)]
    assert list(trial.claim(relay="one")) == events
    trial.move(LEASE.total_seconds())
    assert [event for _ in events for event in trial.claim(relay="two")] == events
    assert {trial.state(event) for event in events} == {"CLAIMED"}


@must("O8.2", "Of a batch that fails in part each event has its own outcome")
def _partly(trial: Trial) -> None:
    expected = {"published": "PUBLISHED", "failed": "PENDING", "dead": "DEAD", "released": "PENDING"}
    events = {outcome: trial.write() for outcome in expected}
    claimed = trial.claim()
    for outcome, event in events.items():
        trial.settle(claimed[event], outcome)
    assert {outcome: trial.state(event) for outcome, event in events.items()} == expected


@must("O9.1", "A publisher gets payload and headers as they were written")
def _unmodified(trial: Trial) -> None:
    headers = {"a": "1", "Ä": "ü"}
    for kind, payload in (("j", b'{"a":  1.50}'), ("t", "Grüße".encode()), ("b", b"\x00\xff")):
        event = trial.write(kind=kind, payload=payload, headers='{"a": "1", "Ä": "ü"}')
        trial.claim()
        found = trial.row(event, "kind", "payload", "headers")
        assert found in ((kind, payload, headers), (kind.encode(), payload, headers)), f"{found}"


@must("O10.1", "Of an ordering_key nothing is claimed past an earlier event that waits or that another relay has")
def _order(trial: Trial) -> None:
    first, second, third = (trial.write(ordering_key="k") for _ in range(3))
    claimed = trial.claim(1, relay="one")
    assert list(claimed) == [first]
    assert trial.claim(relay="two") == {}, "the second was claimed beside the first"
    trial.settle(claimed[first], "failed")
    assert trial.claim() == {}, "the second was claimed during the first one's backoff"
    trial.move(60)
    assert list(trial.claim()) == [first, second, third]


@must("O10.2", "Other keys, and events without one, go on")
def _others(trial: Trial) -> None:
    blocked = trial.write(ordering_key="k")
    trial.settle(trial.claim()[blocked], "failed")
    trial.write(ordering_key="k")
    free = [trial.write(ordering_key="other"), trial.write()]
    assert list(trial.claim()) == free


@must("O10.3", "A DEAD event lets the later ones of its key go on, or holds them if the relay is told so")
def _dead_key(trial: Trial) -> None:
    first = trial.write(ordering_key="k")
    trial.settle(trial.claim()[first], "dead")
    second = trial.write(ordering_key="k")
    assert trial.claim(hold=True) == {}
    assert list(trial.claim(hold=False)) == [second]


@must("O10.4", "Writers of one ordering_key wait for one another until they commit")
def _writers(trial: Trial) -> None:
    held = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND granted AND pid = pg_backend_pid()"
    before = trial.connection.execute(held).fetchall()[0][0]
    trial.write()
    assert trial.connection.execute(held).fetchall() == [(before,)], "an event without a key took a lock"
    trial.write(ordering_key=trial.destination)
    trial.write(ordering_key=trial.destination)
    assert trial.connection.execute(held).fetchall() == [(before + 1,)], "the key is not held"


@must("O11.1", "A replay brings back what is DEAD or PUBLISHED: attempts 0, published_at cleared, last_error kept")
def _replay(trial: Trial) -> None:
    for state in (EventState.DEAD, EventState.PUBLISHED):
        event = trial.in_state(state)
        trial.call("outbox_replay", states=[str(state)], ids=[event], actor="verify", now=trial.now)
        status, attempts, published, error = trial.row(event, "status", "attempts", "published_at", "last_error")
        assert (status, attempts, published) == ("PENDING", 0, None)
        assert error == ("an error" if state is EventState.DEAD else None)


@must("O11.2", "A replay of many keeps the order of a key")
def _replayed_order(trial: Trial) -> None:
    events = [trial.write(ordering_key="k") for _ in range(3)]
    for claimed in trial.claim().values():
        trial.settle(claimed, "published")
    trial.call("outbox_replay", states=["PUBLISHED"], ids=events[::-1], actor="verify", now=trial.now)
    assert list(trial.claim()) == events


@must("O11.3", "A dry run changes nothing, and a replay leaves a record")
def _audited(trial: Trial) -> None:
    event = trial.in_state(EventState.DEAD)
    before = trial.connection.execute("SELECT count(*) FROM custody.outbox_audit").fetchone()
    assert trial.call("outbox_replay", ids=[event], dry_run=True) == [(event,)]
    assert trial.state(event) == "DEAD"
    assert trial.connection.execute("SELECT count(*) FROM custody.outbox_audit").fetchone() == before
    trial.call("outbox_replay", ids=[event], actor="verify", reason="why", now=trial.now)
    record = trial.connection.execute(
        "SELECT actor, action, reason, events FROM custody.outbox_audit ORDER BY entry DESC LIMIT 1"
    ).fetchone()
    assert record == ("verify", "replay", "why", 1), f"the record is {record}"


@must("O11.4", "Pruning by age removes what ended before a time and nothing else, a dry run nothing at all")
def _pruning(trial: Trial) -> None:
    trial.now = datetime(1970, 1, 1, tzinfo=UTC)  # long before any event of the installation
    old = [trial.in_state(EventState.DEAD), trial.in_state(EventState.PUBLISHED)]
    still_open = [trial.in_state(EventState.CLAIMED), trial.in_state(EventState.PENDING)]
    trial.move(3600)
    young = trial.in_state(EventState.PUBLISHED)
    before = trial.now - timedelta(minutes=1)
    states = ["PUBLISHED", "DEAD"]
    left = "SELECT array_agg(event_id ORDER BY id) FROM custody.outbox WHERE destination = %s"
    assert trial.call("outbox_prune", before=before, states=states, dry_run=True) == [(2,)]
    every = trial.connection.execute(left, [trial.destination]).fetchall()
    assert every == [([*old, *still_open, young],)], "the dry run removed something"
    assert trial.call("outbox_prune", before=before, states=states, actor="verify", now=trial.now) == [(2,)]
    assert trial.connection.execute(left, [trial.destination]).fetchall() == [([*still_open, young],)]


@must("O11.5", "Inspection by state and time changes nothing")
def _inspection(trial: Trial) -> None:
    events = {state: trial.in_state(state) for state in EventState}
    try:
        with trial.connection.transaction():
            trial.connection.execute("SET LOCAL transaction_read_only = on")
            for state in (EventState.DEAD, EventState.PUBLISHED):
                found = trial.call(
                    "outbox_chosen", states=[str(state)], until=trial.now + LEASE, destination=trial.destination
                )
                assert [row[1] for row in found] == [events[state]], f"{len(found)} are {state}"
            trial.connection.execute("SELECT FROM custody.outbox_events WHERE destination = %s", [trial.destination])
            trial.call("outbox_stats", now=trial.now)
            trial.call("outbox_records", limit=1)
    except psycopg.errors.ReadOnlySqlTransaction as error:
        raise AssertionError("an inspection wrote something") from error


@must("O11.6", "The table refuses a replay by UPDATE that would not be delivered again, or would be DEAD at once")
def _replayed_by_hand(trial: Trial) -> None:
    free = "claimed_at = NULL, claimed_by = NULL, expires_at = NULL, published_at = NULL"
    changes = f"UPDATE custody.outbox SET status = 'PENDING', attempts = 0, failures = 0, crashes = 0, {free}"
    for state, by in ((EventState.DEAD, 0), (EventState.PUBLISHED, 1)):
        event = trial.in_state(state)
        for wrong in ("", f", replays = replays + {by}", ", replayed_at = now(), replays = replays + 2",
                      f", replayed_at = created_at, replays = replays + {by}"):  # fmt: skip
            assert trial.refused(f"{changes}{wrong} WHERE event_id = %s", event), f"{state}: accepted with {wrong!r}"
        right = f", replayed_at = now(), replays = replays + {by}"
        assert not trial.refused(f"{changes}{right} WHERE event_id = %s", event), f"{state}: refused with {right!r}"


@must("O12.1", "Backlog, the age of the oldest, claimed, dead and published are counted for each destination")
def _figures(trial: Trial) -> None:
    begun = trial.now
    trial.in_state(EventState.DEAD)
    trial.in_state(EventState.PUBLISHED)
    trial.in_state(EventState.CLAIMED)
    trial.in_state(EventState.PENDING)
    rows = trial.call("outbox_stats", now=trial.now)
    (found,) = [row[1:8] for row in rows if row[0] == trial.destination]
    assert found == (1, 1, 0, 1, 1, begun, 1), f"the figures are {found}"


@must("O12.2", "An event that is given back because its publisher is down has spent no attempt")
def _released(trial: Trial) -> None:
    event = trial.write()
    trial.settle(trial.claim()[event], "released", "down")
    assert trial.row(event, "status", "attempts", "releases", "last_error") == ("PENDING", 0, 1, "down")


@must("O12.3", "A relay can pause for a destination: it is left alone, or probed with one event")
def _pause(trial: Trial) -> None:
    events = [trial.write(), trial.write()]
    assert trial.claim(excepted=[trial.destination]) == {}
    assert list(trial.claim(1)) == events[:1]
    assert trial.row(events[1], "status", "attempts") == ("PENDING", 0)
