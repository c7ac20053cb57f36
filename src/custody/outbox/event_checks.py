"""Conformance checks O1 to O7: writing an event, and its lifecycle."""

from __future__ import annotations

from custody.outbox.conformance import FIELDS, IMMUTABLE, LEASE, MAX_ATTEMPTS, Trial, moves, must
from custody.outbox.events import EventState


@must("O1.1", "An event of a transaction that is rolled back was never there")
def _rolled_back(trial: Trial) -> None:
    trial.connection.execute("SAVEPOINT business")
    event = trial.write()
    trial.connection.execute("ROLLBACK TO SAVEPOINT business")
    found = trial.connection.execute("SELECT FROM custody.outbox WHERE event_id = %s", [event]).fetchone()
    assert found is None, "the event is there"


@must("O2.1", "An event has all fields")
def _fields(trial: Trial) -> None:
    event = trial.write(headers='{"a": "1"}', partition_key="p", ordering_key="o")
    status, attempts, *times = trial.row(event, *FIELDS)[7:]
    assert (status, attempts) == ("PENDING", 0)
    assert times[0] is not None, "available_at is not set"


@must("O2.2", "What an event says cannot be changed")
def _immutable(trial: Trial) -> None:
    event = trial.write(headers='{"a": "1"}', partition_key="p", ordering_key="o")
    for column, value in IMMUTABLE.items():
        statement = f"UPDATE custody.outbox SET {column} = {value} WHERE event_id = %s"
        assert trial.refused(statement, event), f"{column} was changed"


_FREE = "claimed_at = NULL, claimed_by = NULL, expires_at = NULL"
_CLAIM = (
    "status = 'CLAIMED', claimed_by = 'x', expires_at = now() + interval '1 min', published_at = NULL, claimed_at = "
)
_AGAIN = f"status = 'PENDING', {_FREE}, published_at = NULL"
_REPLAY = f"{_AGAIN}, attempts = 0, failures = 0, crashes = 0, replayed_at = now(), replays = replays"
_SET = {
    EventState.PENDING: f"{_AGAIN}, attempts = attempts + 1",
    EventState.CLAIMED: f"{_CLAIM} now()",
    EventState.PUBLISHED: f"status = 'PUBLISHED', published_at = now(), {_FREE}",
    EventState.DEAD: f"status = 'DEAD', {_FREE}, published_at = NULL",
}
_REPLAYED = {EventState.PUBLISHED: f"{_REPLAY} + 1", EventState.DEAD: _REPLAY}


def _updated(changes: str) -> str:
    return f"UPDATE custody.outbox SET {changes} WHERE event_id = %s"


@must("O3.1", "The table accepts the six moves and refuses every other")
def _six_moves(trial: Trial) -> None:
    trial.at_present()
    accepted = 0
    for old, new in moves():
        event = trial.in_state(old)
        changes = _REPLAYED[old] if new is EventState.PENDING and old in _REPLAYED else _SET[new]
        refused = trial.refused(_updated(changes), event)
        assert refused != old.may_become(new), f"{old} to {new} was {'refused' if refused else 'accepted'}"
        accepted += not refused
    assert accepted == 6, f"{accepted} moves were accepted"


@must("O3.2", "claimed_at and claimed_by are set exactly when CLAIMED, published_at exactly when PUBLISHED")
def _fields_of_states(trial: Trial) -> None:
    for state in EventState:
        event = trial.in_state(state)
        for column in ("claimed_at", "claimed_by", "published_at"):
            value = trial.row(event, column)[0]
            of_state = EventState.PUBLISHED if column == "published_at" else EventState.CLAIMED
            assert (value is not None) == (state is of_state), f"{column} of a {state} event is {value}"
            other = "NULL" if value is not None else "'x'" if column == "claimed_by" else "now()"
            statement = f"UPDATE custody.outbox SET {column} = {other} WHERE event_id = %s"
            assert trial.refused(statement, event), f"{column} of a {state} event could be set to {other}"


@must("O3.3", "claimed_by cannot change while CLAIMED")
def _same_owner(trial: Trial) -> None:
    event = trial.in_state(EventState.CLAIMED)
    assert trial.refused("UPDATE custody.outbox SET claimed_by = 'somebody else' WHERE event_id = %s", event)


@must("O3.4", "An event begins as PENDING, and none that is open can be deleted")
def _begins(trial: Trial) -> None:
    assert trial.refused(
        "INSERT INTO custody.outbox (event_id, event_type, kind, payload, created_at, available_at, updated_at, "
        "status, published_at) VALUES (gen_random_uuid(), 'x', 'j', '{}', now(), now(), now(), 'PUBLISHED', now())"
    ), "an event began as PUBLISHED"
    for state in (EventState.PENDING, EventState.CLAIMED):
        event = trial.in_state(state)
        assert trial.refused("DELETE FROM custody.outbox WHERE event_id = %s", event), f"a {state} event was deleted"
    truncates = trial.connection.execute(
        "SELECT FROM pg_trigger WHERE tgrelid = 'custody.outbox'::regclass AND tgtype & 32 <> 0 AND tgenabled <> 'D'"
    ).fetchone()
    assert truncates is not None, "nothing keeps open events from a TRUNCATE"


@must("O3.5", "The id of an event is at least 1: a relay would not find it")
def _id(trial: Trial) -> None:
    for number in (0, -1):
        assert trial.refused(
            "INSERT INTO custody.outbox (id, event_id, event_type, kind, payload, created_at, available_at, "
            "updated_at) OVERRIDING SYSTEM VALUE VALUES (%s, gen_random_uuid(), 'x', 'j', '{}', now(), now(), now())",
            number,
        ), f"an event got the id {number}"


@must("O4.1", "A claim sets claimed_at and claimed_by, and takes no more than its limit")
def _claims(trial: Trial) -> None:
    events = [trial.write() for _ in range(5)]
    claimed = trial.claim(3)
    assert list(claimed) == events[:3], f"{len(claimed)} were claimed"
    assert trial.row(events[0], "claimed_at", "claimed_by") == (trial.now, claimed[events[0]][1])
    assert [trial.state(event) for event in events[3:]] == ["PENDING", "PENDING"]


@must("O4.2", "What is claimed is not claimed again while the claim lasts")
def _once(trial: Trial) -> None:
    trial.write()
    assert len(trial.claim(relay="one")) == 1
    assert trial.claim(relay="two") == {}


@must("O4.3", "Nothing is claimed before its available_at")
def _available(trial: Trial) -> None:
    event = trial.write(available_at=trial.now + LEASE)
    assert trial.claim() == {}
    trial.move(LEASE.total_seconds())
    assert list(trial.claim()) == [event]


@must("O4.4", "claimed_by names the relay", "SHOULD")
def _named(trial: Trial) -> None:
    event = trial.write()
    assert trial.claim(relay="relay-7")[event][1].startswith("relay-7")


@must("O4.5", "The table refuses a claim before available_at, and a claimed_at that is not the current time")
def _claimed_by_hand(trial: Trial) -> None:
    trial.at_present()
    later, due = trial.write(available_at=trial.now + LEASE), trial.write(now=trial.now - 10 * LEASE)
    for claimed_at in ("now()", "now() + interval '1 min'"):
        assert trial.refused(_updated(_CLAIM + claimed_at), later), f"at {claimed_at} it was claimed too early"
    for claimed_at in ("now() - interval '1 min'", "now() + interval '1 min'", "NULL"):
        assert trial.refused(_updated(_CLAIM + claimed_at), due), f"it was claimed at {claimed_at}"
    assert not trial.refused(_updated(_CLAIM + "now()"), due), "what is due could not be claimed"


@must("O5.1", "A failure adds an attempt, clears the claim and may move available_at")
def _failure(trial: Trial) -> None:
    event = trial.write()
    assert trial.settle(trial.claim()[event], "failed", "no answer") == ["PENDING"]
    attempts, at, by, available = trial.row(event, "attempts", "claimed_at", "claimed_by", "available_at")
    assert (attempts, at, by) == (1, None, None)
    assert available > trial.now, "available_at did not move"


@must("O5.2", "A failure keeps its error", "SHOULD")
def _error(trial: Trial) -> None:
    event = trial.write()
    trial.settle(trial.claim()[event], "failed", "no answer")
    assert trial.row(event, "last_error") == ("no answer",)


@must("O5.3", "An expired claim counts as an attempt, and the event is claimed again")
def _expiry(trial: Trial) -> None:
    event = trial.write()
    first = trial.claim(relay="one")[event]
    trial.move(LEASE.total_seconds())
    second = trial.claim(relay="two")[event]
    assert second[1] != first[1]
    assert trial.row(event, "attempts") == (1,)


@must("O5.4", "Expiry is seen on reading, before anybody writes it down")
def _seen(trial: Trial) -> None:
    event = trial.in_state(EventState.CLAIMED)  # a day ago
    found = trial.connection.execute(
        "SELECT status, attempts, claimed_by FROM custody.outbox_events WHERE event_id = %s", [event]
    ).fetchone()
    assert found == ("PENDING", 1, None), f"it reads as {found}"


@must("O5.5", "The table refuses CLAIMED to PENDING without one more attempt, unless it is marked as a release")
def _counted(trial: Trial) -> None:
    for attempts in ("attempts", "attempts + 2", "attempts - 1", "0"):
        event = trial.in_state(EventState.CLAIMED)
        assert trial.refused(_updated(f"{_AGAIN}, attempts = {attempts}"), event), f"with attempts = {attempts}"
    for changes in ("attempts = attempts + 1", "releases = releases + 1"):
        event = trial.in_state(EventState.CLAIMED)
        assert not trial.refused(_updated(f"{_AGAIN}, {changes}"), event), f"{changes} was refused"
    event = trial.in_state(EventState.CLAIMED)
    both = f"{_AGAIN}, attempts = attempts + 1, releases = releases + 1"
    assert trial.refused(_updated(both), event), "an attempt was a release, too"


@must("O6.1", "At the last attempt an event is DEAD, and its claim is cleared")
def _attempts(trial: Trial) -> None:
    event = trial.write()
    for _ in range(MAX_ATTEMPTS):
        trial.settle(trial.claim()[event], "failed", "again")
        trial.move(120)
    assert trial.row(event, "status", "attempts", "claimed_at", "claimed_by") == ("DEAD", MAX_ATTEMPTS, None, None)


@must("O6.2", "An event past the age limit is DEAD and not published")
def _age(trial: Trial) -> None:
    event = trial.write()
    trial.move(3600)
    assert trial.claim(max_age=LEASE) == {}
    assert trial.state(event) == "DEAD"


@must("O6.3", "A terminal error makes an event DEAD at once")
def _terminal(trial: Trial) -> None:
    event = trial.write()
    assert trial.settle(trial.claim()[event], "dead", "never") == ["DEAD"]
    assert trial.row(event, "attempts", "last_error") == (1, "never")


@must("O6.4", "The operator can end an event, whether it waits or is claimed")
def _operator(trial: Trial) -> None:
    events = [trial.in_state(EventState.CLAIMED), trial.in_state(EventState.PENDING)]
    assert len(trial.call("outbox_kill", ids=events, actor="verify", now=trial.now)) == 2
    assert {trial.state(event) for event in events} == {"DEAD"}


@must("O6.5", "What is DEAD or PUBLISHED is never claimed by itself")
def _final(trial: Trial) -> None:
    trial.in_state(EventState.DEAD)
    trial.in_state(EventState.PUBLISHED)
    trial.move(3600)
    assert trial.claim() == {}


@must("O6.6", "An event that kills its relays is DEAD, and none that was claimed with it")
def _deadly(trial: Trial) -> None:
    events = [trial.write() for _ in range(20)]
    deadly = events[7]
    for expiries in range(2 + MAX_ATTEMPTS):  # a claim of 20, one of 2, and those of the event alone
        while deadly not in (claimed := trial.claim()):
            assert claimed, f"it was not claimed again after {expiries} expiries"
            for one in claimed.values():
                trial.settle(one, "published")
        trial.move(LEASE.total_seconds())
    while claimed := trial.claim():
        for one in claimed.values():
            trial.settle(one, "published")
    states = {event: trial.state(event) for event in events}
    assert states.pop(deadly) == "DEAD"
    assert set(states.values()) == {"PUBLISHED"}, f"the others are {set(states.values())}"
    assert trial.row(deadly, "claimed_at", "claimed_by") == (None, None)


@must("O6.7", "Attempts kill an event only when its time for them is over, too, and an outage never does")
def _budget(trial: Trial) -> None:
    event = trial.write()
    for outcome, attempts in (("failed", MAX_ATTEMPTS), ("unavailable", MAX_ATTEMPTS + 1)):
        while trial.row(event, "attempts")[0] < attempts:
            trial.settle(trial.claim()[event], outcome, outcome, retry_for=LEASE * 100)
            trial.move(60)
        assert trial.row(event, "status", "attempts", "last_error") == ("PENDING", attempts, outcome)
    trial.move(100 * LEASE.total_seconds())
    assert trial.settle(trial.claim()[event], "unavailable", retry_for=LEASE * 100) == ["PENDING"]
    assert trial.settle(trial.claim()[event], "failed", retry_for=LEASE * 100) == ["DEAD"]


@must("O6.8", "What was tried during an outage does not use up the attempts of an event")
def _outage(trial: Trial) -> None:
    event = trial.write()
    for _ in range(2 * MAX_ATTEMPTS):
        assert trial.settle(trial.claim()[event], "unavailable") == ["PENDING"]
        trial.move(60)
    for failure in range(1, MAX_ATTEMPTS + 1):
        expected = "DEAD" if failure == MAX_ATTEMPTS else "PENDING"
        assert trial.settle(trial.claim()[event], "failed") == [expected], f"after {failure} failures"
        trial.move(60)
    assert trial.row(event, "attempts")[0] == 3 * MAX_ATTEMPTS


@must("O7.1", "A relay whose claim has expired finalises nothing")
def _too_late(trial: Trial) -> None:
    event = trial.write()
    claimed = trial.claim()[event]
    trial.move(LEASE.total_seconds())
    assert trial.settle(claimed, "published") == [], "at the deadline it was finalised"
    assert trial.state(event) == "CLAIMED"


@must("O7.2", "A relay whose event another one has finalises nothing")
def _lost(trial: Trial) -> None:
    event = trial.write()
    first = trial.claim(relay="one")[event]
    trial.move(LEASE.total_seconds())
    second = trial.claim(relay="two")[event]
    for outcome in ("published", "failed", "dead", "released"):
        assert trial.settle(first, outcome) == [], f"it was {outcome}"
    assert trial.settle(second, "published") == ["PUBLISHED"]
    assert trial.row(event, "published_at") == (trial.now,)


@must("O7.3", "The table refuses PUBLISHED from a claim that has expired, and to extend such a claim")
def _expired_by_hand(trial: Trial) -> None:
    expired = trial.in_state(EventState.CLAIMED)  # a day ago
    trial.at_present()
    held = trial.in_state(EventState.CLAIMED)
    for published_at in ("now()", "claimed_at"):
        changes = f"status = 'PUBLISHED', published_at = {published_at}, {_FREE}"
        assert trial.refused(_updated(changes), expired), f"it was published with published_at = {published_at}"
    assert trial.refused(_updated("expires_at = now() + interval '1 h'"), expired), "an expired claim was extended"
    assert not trial.refused(_updated("expires_at = now() + interval '1 h'"), held), "a claim could not be extended"
    assert not trial.refused(_updated(_SET[EventState.PUBLISHED]), held), "it could not be published"
