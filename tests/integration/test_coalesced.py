"""What a server does for many callers at once: one transaction, and for each its own answer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any

import msgspec
import psycopg
import pytest
from tests.conftest import Clock
from tests.waiting import wait_for

import custody
from custody import errors
from custody.coalesced import Ack, Claim, Publish
from custody.engine.server_verbs import ServerVerbs
from custody.model.entities import Delayed, Outgoing, Receipt, Settled

pytestmark = pytest.mark.core


@pytest.fixture
def verbs(c: custody.Custody) -> ServerVerbs:
    return ServerVerbs(c)


def one(topic: str, payload: object, **rest: object) -> Publish:
    return Publish(messages=[(topic, Outgoing(payload, **rest))])


@pytest.mark.req("C5")
def test_publishes_of_many_callers_are_one_transaction(
    c: custody.Custody, verbs: ServerVerbs, commits: Callable[[], int]
) -> None:
    c.create_topic("orders", partitions=3)
    c.create_topic("stock")
    answers = verbs.publish_each([one("orders" if n % 2 else "stock", n, key=str(n)) for n in range(40)])
    assert all(isinstance(answer, list) for answer in answers)
    read = {
        (topic, message.partition, message.offset): message.payload
        for topic, partitions in (("orders", 3), ("stock", 1))
        for partition in range(partitions)
        for message in c.read(topic, partition)
    }
    assert [read[(a[0].topic, a[0].partition, a[0].offset)] for a in answers] == list(range(40))
    assert commits() == 1


@pytest.mark.req("C5")
def test_a_refusal_is_its_callers_own(c: custody.Custody, verbs: ServerVerbs) -> None:
    c.create_topic("orders", max_depth=4)
    c.init_producer("p")
    answers = verbs.publish_each(
        [
            one("orders", 1),
            one("nowhere", 2),
            one("orders", float("nan")),
            one("orders", 3, partition=7),
            Publish(messages=[("orders", Outgoing(4))], producer=("p", 1, 5)),
            Publish(messages=[("orders", Outgoing(5))], producer=("p", 1, 0)),
            one("orders", 6),
            Publish(messages=[("orders", Outgoing(7)), ("orders", Outgoing(8)), ("orders", Outgoing(9))]),
        ]
    )
    codes = [answer.code if isinstance(answer, errors.CustodyError) else None for answer in answers]
    assert codes == [
        None, "topic_not_found", "invalid_payload", "partition_not_found", "sequence_conflict", None, None,
        "queue_full",
    ]  # fmt: skip
    assert sorted(message.payload for message in c.read("orders")) == [1, 5, 6]


@pytest.mark.req("G11", "C5")
def test_a_repeat_among_others_returns_the_first_receipt(c: custody.Custody, verbs: ServerVerbs) -> None:
    c.create_topic("orders")
    c.init_producer("p")
    mine = Publish(messages=[("orders", Outgoing("once"))], producer=("p", 1, 0))
    first = verbs.publish_each([mine, one("orders", "other")])[0]
    again = verbs.publish_each([one("orders", "other"), mine])[1]
    assert again == [Receipt("orders", first[0].partition, first[0].offset, True)]
    assert [message.payload for message in c.read("orders")].count("once") == 1


@pytest.mark.req("G15", "C5")
def test_a_caller_may_mix_topics_and_delays_and_it_is_all_or_nothing(c: custody.Custody, verbs: ServerVerbs) -> None:
    c.create_topic("orders")
    c.create_topic("stock")
    mixed = [("orders", Outgoing(1)), ("stock", Outgoing(2, delay="5s")), ("orders", Outgoing(3))]
    spoiled = [*mixed, ("stock", Outgoing(4, partition=9))]
    good, bad = verbs.publish_each([Publish(messages=mixed), Publish(messages=spoiled)])
    assert [type(receipt) for receipt in good] == [Receipt, Delayed, Receipt]
    assert isinstance(bad, errors.PartitionNotFound)
    assert [message.payload for message in c.read("orders")] == [1, 3]
    assert c.delayed_count("stock") == 1


@pytest.mark.req("C5")
def test_a_partition_that_is_held_stops_only_those_who_publish_to_it(
    c: custody.Custody, verbs: ServerVerbs, db: psycopg.Connection, database_url: str
) -> None:
    """A publish to a free topic is committed while another one of the same call waits for a held partition."""
    c.create_topic("held")
    c.create_topic("free")
    answers: list[object] = []
    with psycopg.connect(database_url) as holder:
        holder.execute(
            "SELECT FROM custody.heads h JOIN custody.topics t USING (topic_id) WHERE t.name = 'held' FOR UPDATE"
        )
        both = threading.Thread(target=lambda: answers.extend(verbs.publish_each([one("held", 1), one("free", 2)])))
        both.start()
        wait_for(lambda: [message.payload for message in c.read("free")] == [2], "the free topic has its message")
        assert not answers
        holder.rollback()
    both.join(10)
    assert [type(answer[0]) for answer in answers] == [Receipt, Receipt]


@pytest.mark.req("G3")
def test_raw_json_is_kept_letter_for_letter(c: custody.Custody, verbs: ServerVerbs, db: psycopg.Connection) -> None:
    c.create_topic("orders")
    c.create_group("orders", "g")
    documents = [b'{"b": 1.0, "a": 12345678901234567890123, "b": 2}', b'"text"', b"null", b"[1e2]"]
    verbs.publish_each([one("orders", msgspec.Raw(document)) for document in documents])
    leases = verbs.claim_each("orders", "g", None, [Claim(max_messages=10)])
    payloads = [message.payload for message in leases[0].messages]
    assert [bytes(p) if isinstance(p, msgspec.Raw) else p for p in payloads] == [
        documents[0],
        "text",
        b"null",
        b"[1e2]",
    ]
    refused = verbs.publish_each([one("orders", msgspec.Raw(b'"\\ud800"')), one("orders", msgspec.Raw(b"1e999"))])
    assert all(isinstance(answer, errors.InvalidPayload) for answer in refused)


@pytest.mark.req("C5", "N2")
def test_acks_of_many_callers_are_one_transaction_and_each_is_fenced(
    c: custody.Custody, verbs: ServerVerbs, db: psycopg.Connection, clock: Clock
) -> None:
    c.create_topic("orders", partitions=2)
    c.create_group("orders", "g")
    for n in range(8):
        c.publish("orders", n, partition=n % 2)
    leases = [c.claim("orders", "g", partition=n % 2) for n in range(4)]
    pair = c.claim("orders", "g", partition=0, max_messages=2)
    late = c.claim("orders", "g", partition=1, visibility_timeout="1s")
    clock.move(1)
    before = db.execute("SELECT coalesce(max(entry), 0) FROM custody.journal").fetchone()[0]
    acks = [
        Ack(lease_id=lease.lease_id, offsets=[lease.messages[0].offset], worker=f"w{n}")
        for n, lease in enumerate(leases)
    ]
    elsewhere = Ack(lease_id=pair.lease_id, offsets=[pair.messages[0].offset], topic="orders", partition=1)
    alien = Ack(lease_id=pair.lease_id, offsets=[pair.messages[0].offset, 999])
    rest = Ack(lease_id=pair.lease_id, offsets=None)
    expired = Ack(lease_id=late.lease_id, offsets=None)
    answers = verbs.ack_each([*acks, elsewhere, alien, rest, expired])
    assert answers[:4] == [Settled(settled=1)] * 4
    assert [getattr(answer, "code", None) for answer in answers[4:]] == ["lease_lost", "lease_lost", None, "lease_lost"]
    assert answers[5].lost == (999,)
    assert answers[6] == Settled(settled=1)
    entries = db.execute("SELECT DISTINCT xid FROM custody.journal WHERE entry > %s", [before]).fetchall()
    assert len(entries) == 1
    assert db.execute("SELECT count(*) FROM custody.journal WHERE kind = 'ack' AND worker = 'w2'").fetchone() == (1,)


@pytest.mark.req("G5")
def test_without_a_receipt_the_delivery_is_meant_that_is_live(
    c: custody.Custody, verbs: ServerVerbs, clock: Clock
) -> None:
    c.create_topic("orders")
    c.create_group("orders", "default")
    for n in range(4):
        c.publish("orders", n)

    def ack(offset: int) -> object:
        answer = verbs.ack_each([Ack(lease_id=None, offsets=[offset], topic="orders", group="default", partition=0)])[0]
        return getattr(answer, "code", answer)

    assert ack(0) == "lease_lost"  # not delivered yet
    lease = c.claim("orders", "default", max_messages=4)
    assert ack(0) == Settled(settled=1)
    assert ack(0) == "lease_lost"
    c.nack(lease.lease_id, [1])
    c.release(lease.lease_id, [2])
    clock.move(1)
    assert {message.offset for message in c.claim("orders", "default", max_messages=2)} == {1, 2}
    assert ack(1) == Settled(settled=1)  # of the second delivery
    assert ack(2) == Settled(settled=1)
    assert ack(2) == "lease_lost"
    c.extend(lease.lease_id, "60s", offset=3)  # moves it into a part of its own
    assert ack(3) == Settled(settled=1)
    c.rewind("orders", "default", to_offset=3)
    assert [message.offset for message in c.claim("orders", "default")] == [3]
    assert ack(3) == Settled(settled=1)
    assert ack(4) == "lease_lost"


def test_claims_for_many_callers_end_with_the_reason(c: custody.Custody, verbs: ServerVerbs) -> None:
    c.create_topic("orders", partitions=4)
    c.create_group("orders", "g", custody.Policy(ordering="key"))
    c.publish_many("orders", [Outgoing(n, key=str(n % 3)) for n in range(6)])
    leases = verbs.claim_each("orders", "g", None, [Claim(max_messages=1, worker=f"w{n}") for n in range(8)])
    assert [bool(lease) for lease in leases] == [True] * (len(leases) - 1) + [False]
    assert sorted(message.key for lease in leases for message in lease) == ["0", "1", "2"]
    assert leases[-1].reason in ("empty", "busy")  # busy: what it found is behind the keys that the others have


@pytest.mark.req("C5", "G14")
def test_a_claim_for_many_is_divided_into_a_lease_for_each(
    c: custody.Custody, verbs: ServerVerbs, db: psycopg.Connection, clock: Clock
) -> None:
    """It has messages that were released, a retry and fresh ones."""
    c.create_topic("orders")
    c.create_group("orders", "g", custody.Policy(backoff=custody.Constant("1s"), visibility_timeout="40s"))
    c.publish_many("orders", list(range(12)))
    first = c.claim("orders", "g", max_messages=6)
    first.nack(first.messages[1])
    first.release()
    clock.move(1)
    callers = [
        Claim(max_messages=most, worker=f"w{n}", visibility_timeout=timeout)
        for n, (most, timeout) in enumerate([(1, "10s"), (3, None), (1, "20s"), (4, None), (9, "1m")])
    ]
    leases = verbs.claim_each("orders", "g", None, callers)
    assert [len(lease) for lease in leases if lease] == [1, 3, 1, 4, 3]
    assert [(lease.deadline - clock()).total_seconds() for lease in leases if lease] == [10, 40, 20, 40, 60]
    given = {message.offset: message.attempt for lease in leases for message in lease}
    assert given == {**dict.fromkeys(range(12), 1), 1: 2}
    for n, lease in enumerate(leases):
        claims = "SELECT worker, offsets FROM custody.journal WHERE kind = 'claim' AND lease_id = %s"
        (worker, offsets) = db.execute(claims, [lease.lease_id]).fetchone()
        assert worker == f"w{n}"
        assert sorted(o for r in offsets for o in range(r.lower, r.upper)) == [message.offset for message in lease]
    two, four = leases[1], leases[3]
    with pytest.raises(errors.LeaseLost) as lost:
        c.ack(two.lease_id, [four.messages[0].offset])
    assert lost.value.lost == (four.messages[0].offset,)
    assert two.ack(two.messages[0]) == Settled(settled=1)
    assert two.ack() == Settled(settled=2)
    assert two.ack() == Settled(settled=3, already=True)
    assert four.nack(requeue=False).dead == tuple(message.offset for message in four)
    clock.move(39)  # the first and the third have expired
    again = verbs.claim_each("orders", "g", None, [Claim(max_messages=9)] * 3)
    expired = {message.offset for lease in (leases[0], leases[2]) for message in lease}
    assert {message.offset for lease in again for message in lease} == expired
    assert c.stats("orders", "g").in_flight == 2 + 3


def test_leases_that_were_divided_can_be_extended_message_by_message(c: custody.Custody, verbs: ServerVerbs) -> None:
    c.create_topic("orders")
    c.create_group("orders", "g")
    c.publish_many("orders", list(range(6)))
    leases = verbs.claim_each("orders", "g", None, [Claim(max_messages=2)] * 3)
    for lease in leases:
        for message in lease:
            lease.extend("5m", message=message)
    assert c.in_flight("orders", "g") == {0: (6, 0.0)}
    assert [lease.ack().settled for lease in leases] == [2, 2, 2]


@pytest.mark.req("C5")
def test_claims_for_many_go_on_in_the_next_partition(c: custody.Custody, verbs: ServerVerbs) -> None:
    c.create_topic("orders", partitions=3)
    c.create_group("orders", "g", custody.Policy(max_in_flight=7))
    for n in range(12):
        c.publish("orders", n, partition=n % 3)
    leases = verbs.claim_each("orders", "g", None, [Claim(max_messages=3)] * 6)
    assert [len(lease) for lease in leases if lease] == [3, 1, 3, 1, 3, 1]
    assert len({(m.partition, m.offset) for lease in leases for m in lease}) == 12
    assert [len({m.partition for m in lease}) for lease in leases] == [1] * 6
    for answer in verbs.ack_each([Ack(lease_id=lease.lease_id, offsets=None) for lease in leases] * 2):
        assert isinstance(answer, Settled)
    assert c.stats("orders", "g").depth == 0


@pytest.mark.req("N2")
def test_acks_of_many_close_a_breaker_by_its_probe_alone(c: custody.Custody, verbs: ServerVerbs, clock: Clock) -> None:
    c.create_topic("orders")
    breaker = custody.Breaker(failure_rate=0.5, min_outcomes=2, probe_after="5s")
    c.create_group("orders", "g", custody.Policy(breaker=breaker, backoff=custody.Constant("0s")))
    c.publish_many("orders", list(range(9)))
    others = [c.claim("orders", "g") for _ in range(2)]
    c.claim("orders", "g", max_messages=3).nack(error="down")
    clock.move(5)
    leases = verbs.claim_each("orders", "g", None, [Claim(max_messages=2)] * 3)
    assert ([len(lease) for lease in leases], leases[-1].reason) == ([1, 0], "breaker_open")
    verbs.ack_each([Ack(lease_id=lease.lease_id, offsets=None) for lease in others])
    assert c.stats("orders", "g").breaker == "probing"
    verbs.ack_each([Ack(lease_id=lease.lease_id, offsets=None) for lease in (others[0], leases[0])])
    assert c.stats("orders", "g").breaker == "closed"


def test_claims_for_many_callers_end_after_half_a_second(
    c: custody.Custody, verbs: ServerVerbs, db: psycopg.Connection
) -> None:
    """However long each of them takes: whoever is left is served by the next transaction."""
    c.create_topic("orders")
    c.create_group("orders", "g", custody.Policy(ordering="key"))
    c.publish_many("orders", [Outgoing(n, key=str(n)) for n in range(4)])
    db.execute(
        "CREATE FUNCTION linger() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_sleep(0.3); RETURN NEW; END'"
    )
    db.execute("CREATE TRIGGER linger BEFORE INSERT ON custody.leases FOR EACH ROW EXECUTE FUNCTION linger()")
    leases = verbs.claim_each("orders", "g", None, [Claim(max_messages=1)] * 4)
    assert [message.offset for lease in leases for message in lease] in ([0], [0, 1])


@pytest.mark.req("G10", "V11")
@pytest.mark.parametrize(("dead_letter", "served"), [("topic", 1), ("keep", 3)])
def test_a_bound_group_with_a_dead_letter_topic_serves_one_caller_in_a_transaction(
    c: custody.Custody, verbs: ServerVerbs, clock: Clock, dead_letter: str, served: int
) -> None:
    """A claim that copies what has died holds the heads of that topic: no other one matches anything under them."""
    policy = custody.Policy(max_attempts=1, dead_letter=dead_letter)  # type: ignore[arg-type]
    c.create_topic("orders")
    c.create_group("orders", "g", policy, bindings=["in"])
    c.publish_many("orders", [Outgoing(n, routing_key="in") for n in range(5)])
    c.claim("orders", "g", visibility_timeout="1s")
    clock.move(1)
    leases = verbs.claim_each("orders", "g", None, [Claim(max_messages=1)] * 3)
    assert [message.offset for lease in leases for message in lease] == [1, 2, 3][:served]
    assert c.stats("orders", "g").dead == 1


@pytest.mark.req("G13")
def test_what_is_in_flight_is_counted_for_each_partition(c: custody.Custody, clock: Clock) -> None:
    c.create_topic("orders", partitions=2)
    for name in ("a", "b"):
        c.create_group("orders", name)
    for n in range(6):
        c.publish("orders", n, partition=0)
    assert c.in_flight("orders") == {0: (0, None), 1: (0, None)}
    c.claim("orders", "a", max_messages=2)
    clock.move(10)
    c.claim("orders", "b", max_messages=3)
    clock.move(5)
    assert c.in_flight("orders") == {0: (5, 15.0), 1: (0, None)}
    assert c.in_flight("orders", "b")[0] == (3, 5.0)
    clock.move(20)
    assert c.in_flight("orders")[0] == (3, 25.0)  # the others have expired
    with pytest.raises(errors.GroupNotFound):
        c.in_flight("orders", "nobody")


def test_a_topic_that_stays_busy_is_waited_for_once(
    c: custody.Custody, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not once for each of those who came together."""
    c.create_topic("orders")
    bounded = f"{database_url}{'&' if '?' in database_url else '?'}options=-c%20lock_timeout%3D300"
    with psycopg.connect(database_url) as holder, custody.connect(bounded) as impatient:
        holder.execute("SELECT FROM custody.heads FOR UPDATE")
        called: list[str] = []
        real = impatient._db.call
        monkeypatch.setattr(impatient._db, "call", lambda name, **given: (called.append(name), real(name, **given))[1])
        answers = ServerVerbs(impatient).publish_each([one("orders", n) for n in range(20)])
        assert [name for name in called if name != "layout"] == ["append"]
    assert {type(answer) for answer in answers} == {errors.Busy}
    assert c.read("orders") == []


@pytest.mark.req("G15", "G20")
@pytest.mark.parametrize("year", [1, 9999])
def test_a_time_that_no_clock_of_ours_can_tell_is_refused_and_doubles_nobody(
    c: custody.Custody, verbs: ServerVerbs, year: int
) -> None:
    c.create_topic("orders")
    zone = timezone(timedelta(hours=14 if year == 1 else -14))
    at = datetime(year, 1, 1, tzinfo=zone) if year == 1 else datetime(year, 12, 31, 23, tzinfo=zone)
    good, bad = verbs.publish_each([one("orders", "innocent"), one("orders", "odd", deliver_at=at)])
    assert isinstance(bad, errors.InvalidArgument)
    assert len(good) == 1
    assert [message.payload for message in c.read("orders")] == ["innocent"]
    assert c.delayed_count("orders") == 0


def test_what_was_done_and_cannot_be_read_is_not_done_again(
    c: custody.Custody, verbs: ServerVerbs, monkeypatch: pytest.MonkeyPatch, commits: Callable[[], int]
) -> None:
    """Whatever the reason: a publish whose answer cannot be read is unknown to its caller, and nobody repeats it."""
    c.create_topic("orders")
    execute, fetchall, queries = psycopg.Cursor.execute, psycopg.Cursor.fetchall, dict[int, str]()

    def noted(cursor: psycopg.Cursor, query: Any, *given: Any, **more: Any) -> object:
        queries[id(cursor)] = repr(query)
        return execute(cursor, query, *given, **more)

    def unreadable(cursor: psycopg.Cursor) -> object:
        if "append" in queries[id(cursor)]:
            raise psycopg.DataError("timestamp too large")
        return fetchall(cursor)

    monkeypatch.setattr(psycopg.Cursor, "execute", noted)
    monkeypatch.setattr(psycopg.Cursor, "fetchall", unreadable)
    answers = verbs.publish_each([one("orders", n) for n in range(3)])
    assert {type(answer) for answer in answers} == {errors.DatabaseUnavailable}
    monkeypatch.undo()
    assert [message.payload for message in c.read("orders")] == [0, 1, 2]
    assert commits() == 1


@pytest.mark.req("G5")
def test_each_lease_is_of_its_own_topic(c: custody.Custody, db: psycopg.Connection) -> None:
    for topic in ("orders", "bills"):
        c.create_topic(topic)
        c.create_group(topic, "g")
        c.publish(topic, 1)
    leases = [c.claim(topic, "g").lease_id for topic in ("orders", "bills")]
    places = [db.execute("SELECT (custody.lease_place(%s)).topic", [lease]).fetchone() for lease in leases]
    assert places == [("orders",), ("bills",)]


@pytest.mark.req("G5")
def test_an_ack_of_a_part_is_not_taken_for_one_of_the_whole_lease(
    c: custody.Custody, verbs: ServerVerbs, clock: Clock
) -> None:
    """The offsets are all that a lease of another topic holds."""
    leases = {}
    for topic, count in (("orders", 3), ("bills", 2)):
        c.create_topic(topic)
        c.create_group(topic, "g")
        c.publish_many(topic, [Outgoing(n) for n in range(count)])
        leases[topic] = c.claim(topic, "g", max_messages=3).lease_id
    assert verbs.ack_each([Ack(lease_id=leases["orders"], offsets=[0, 1])]) == [Settled(settled=2)]
    assert c.stats("orders", "g").in_flight == 1


@pytest.mark.req("G5", "G14")
def test_a_message_without_a_live_lease_is_held_by_nobody(c: custody.Custody, verbs: ServerVerbs, clock: Clock) -> None:
    c.create_topic("orders")
    c.create_group("orders", "g")
    c.publish("orders", 1)
    assert c.claim("orders", "g")
    clock.move(30)
    (answer,) = verbs.ack_each([Ack(lease_id=None, offsets=[0], topic="orders", group="g", partition=0)])
    assert isinstance(answer, errors.LeaseLost)
    assert "no lease of group 'g' holds offset 0" in str(answer)


@pytest.mark.req("C5", "G14")
def test_an_ack_of_the_rest_of_a_lease_that_is_over_settles_nothing(
    c: custody.Custody, db: psycopg.Connection, clock: Clock
) -> None:
    c.create_topic("orders")
    c.create_group("orders", "g")
    c.publish_many("orders", [Outgoing(n) for n in range(3)])
    lease = c.claim("orders", "g", max_messages=3)
    lease.ack(lease.messages[0])
    clock.move(30)
    rows = db.execute(
        "SELECT settled, lost, already FROM custody.ack_each(ARRAY[%s]::uuid[], '{1}', '{2}', '{1,2}', '{NULL}', "
        "'{NULL}', '{NULL}', '{NULL}', p_now => %s)",
        [lease.lease_id, clock()],
    ).fetchall()
    assert rows == [(0, [1, 2], False)]
