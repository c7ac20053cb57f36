"""The verbs of a pipeline, without Spark: numbered claims, epochs, staging, and the one transaction of a commit."""

from __future__ import annotations

import time
from datetime import timedelta

import psycopg
import pytest
from tests.conftest import Clock

import custody
from custody.errors import ClaimLost, PipelineFenced, StageLost
from custody.model import codec, placement
from custody.model.outcomes import Outcome
from custody.spark.database.tasks import TaskClaim
from custody.verbs import delays
from custody.verbs.pipelines import BatchReport, DriverVerbs, PassLimit, StagedCount, stage_of

pytestmark = [pytest.mark.core, pytest.mark.req("S4")]

ORDERED = custody.Policy(ordering="key", max_attempts=3, backoff=custody.Constant("10s"))


@pytest.fixture
def source(c: custody.Custody) -> custody.Custody:
    c.create_topic("in", partitions=2)
    c.create_topic("out", partitions=2)
    c.create_group("in", "g", ORDERED)
    return c


def publish(c: custody.Custody, count: int, keys: int = 5) -> None:
    c.publish_many("in", [custody.Outgoing({"n": n}, key=f"k{n % keys}") for n in range(count)])


def messages(c: custody.Custody, drive: DriverVerbs, number: int) -> list[custody.Message]:
    """What the tasks of a claim would read, in order."""
    found = []
    for part in drive.claimed(number):
        for first, last in part.ranges:
            found += c.read("in", part.partition, offset=first, max_messages=last - first)
    return found


def task(c: custody.Custody, drive: DriverVerbs, number: int) -> TaskClaim:
    """The claim, as a task knows it."""
    return TaskClaim(c.database_url, drive.driver.group_id, number)


def stage(c: custody.Custody, drive: DriverVerbs, number: int, outputs: list[custody.Message]) -> list[StagedCount]:
    """One task that passes these messages on."""
    sink = drive.sink("out")
    staged = task(c, drive, number).stage()
    for message in outputs:
        place = placement.partition_for(message.key or "", sink[1])
        encoded = codec.encode_message(custody.Outgoing(message.payload, key=message.key))
        staged.add(sink, place, (message.partition, message.offset), encoded)
    return staged.write()


def run(c: custody.Custody, drive: DriverVerbs, number: int, failing: dict[int, Outcome] | None = None) -> BatchReport:
    """What a batch reports in which the messages with these numbers fail, and each key stops at its first failure."""
    work, stopped, done = BatchReport(), set(), []
    for message in messages(c, drive, number):
        if message.key in stopped:
            continue
        outcome = (failing or {}).get(message.payload["n"])
        if outcome is None:
            done.append(message)
            continue
        work.failed[message.partition, message.offset] = outcome
        if outcome.stops_key("release"):
            stopped.add(message.key)
    work.placed, work.ran = stage(c, drive, number, done), len(done)
    return work


def published(c: custody.Custody, topic: str = "out") -> list[tuple[str | None, int]]:
    return [
        (message.key, message.payload["n"])
        for partition in range(2)
        for message in c.read(topic, partition, max_messages=10_000)
    ]


def assert_in_key_order(found: list[tuple[str | None, int]]) -> None:
    for key in {key for key, _ in found}:
        numbers = [n for k, n in found if k == key]
        assert numbers == sorted(set(numbers))


def test_a_claim_takes_from_every_partition_and_its_commit_publishes_and_settles(source: custody.Custody) -> None:
    publish(source, 100)
    drive, _ = source.drive("in", "g")
    claim = drive.claim(1000)
    assert (claim.number, claim.messages) == (1, 100)
    assert source.stats("in", "g").in_flight == 100
    assert drive.claim(1000) == claim, "the claim in flight is handed out again"
    result = drive.commit(1, run(source, drive, 1))
    assert (result.done, result.outputs, result.failed, result.lost) == (100, 100, 0, 0)
    assert sorted(n for _, n in published(source)) == list(range(100))
    assert_in_key_order(published(source))
    assert source.stats("in", "g").depth == 0
    assert drive.claim(1000).reason == "empty"


def test_the_share_that_small_partitions_leave_goes_to_the_others(c: custody.Custody) -> None:
    c.create_topic("in", partitions=4)
    c.create_group("in", "g", ORDERED)
    for partition, count in enumerate([1000, 3, 0, 50]):
        if count:
            c.publish_many("in", [custody.Outgoing(n, partition=partition) for n in range(count)])
    drive, _ = c.drive("in", "g")
    assert drive.claim(600).messages == 600
    assert {part.partition: part.messages for part in drive.claimed(1)} == {0: 547, 1: 3, 3: 50}


def test_a_repeated_commit_changes_nothing_and_says_what_the_first_one_did(source: custody.Custody) -> None:
    publish(source, 30)
    drive, _ = source.drive("in", "g")
    number = drive.claim(1000).number
    assert number is not None
    work = run(source, drive, number, {7: Outcome("nack", error="no")})
    first = drive.commit(number, work)
    again = drive.commit(number, work)
    assert again.repeated
    assert not first.repeated
    assert (first.done, first.failed, first.outputs) == (again.done, again.failed, again.outputs) == (25, 1, 25)
    assert len(published(source)) == 25


def test_a_failure_stops_its_key_and_nothing_else(source: custody.Custody, clock: Clock) -> None:
    publish(source, 50)
    drive, _ = source.drive("in", "g")
    result = drive.commit(1, run(source, drive, drive.claim(1000).number or 0, {10: Outcome("nack", error="boom")}))
    assert (result.done, result.failed, result.released, result.dead) == (42, 1, 7, 0)
    assert drive.claim(1000).reason == "empty"
    clock.move(11)
    claim = drive.claim(1000)
    assert claim.messages == 1, "what waits behind it is not due before it is done"
    drive.commit(2, run(source, drive, 2))
    while claim := drive.claim(1000):
        if claim.number is None:
            break
        drive.commit(claim.number, run(source, drive, claim.number))
    assert sorted(n for _, n in published(source)) == list(range(50))
    assert_in_key_order(published(source))


def test_outputs_of_what_has_to_wait_are_not_published(source: custody.Custody) -> None:
    """A frame stages all its rows; those behind a failed one of their key are dropped at the commit."""
    publish(source, 50)
    drive, _ = source.drive("in", "g")
    number = drive.claim(1000).number or 0
    everything = messages(source, drive, number)
    bad = next(message for message in everything if message.payload["n"] == 10)
    work = BatchReport(exact=False)
    half = len(everything) // 2
    work.placed = stage(source, drive, number, everything[half:]) + stage(source, drive, number, everything[:half])
    work.failed[bad.partition, bad.offset] = Outcome("nack", error="boom")
    result = drive.commit(number, work)
    assert (result.done, result.failed, result.released, result.outputs) == (42, 1, 7, 42)
    assert [n for key, n in published(source) if key == "k0"] == [0, 5]
    assert_in_key_order(published(source))


@pytest.mark.req("G15", "S4")
@pytest.mark.parametrize("exact", [True, False])
def test_outputs_may_be_delayed(source: custody.Custody, clock: Clock, exact: bool) -> None:
    """They are stored in the transaction that makes their source done; those of a failed one are not."""
    publish(source, 20)
    drive, _ = source.drive("in", "g")
    number = drive.claim(1000).number or 0
    everything = messages(source, drive, number)
    sink, work = drive.sink("out"), BatchReport(exact=exact)
    staged = task(source, drive, number).stage()
    bad = [] if exact else [message for message in everything if message.payload["n"] == 19]
    for message in everything:
        n = message.payload["n"]
        later = custody.Outgoing(
            message.payload,
            key=message.key,
            headers={"n": str(n)},
            delay=n + 1 if n % 2 else None,
            deliver_at=None if n % 2 else clock() + timedelta(hours=n + 1),
        )
        encoded = codec.encode_message(
            custody.Outgoing(later.payload, key=later.key, headers=delays.staged_headers(later))
        )
        place = placement.partition_for(message.key or "", sink[1])
        staged.add(sink, place, (message.partition, message.offset), encoded, waits=True)
        staged.add(
            sink, place, (message.partition, message.offset), codec.encode_message(custody.Outgoing(message.payload))
        )
    work.placed, work.ran = staged.write(), len(everything)
    for message in bad:
        work.failed[message.partition, message.offset] = Outcome("nack", error="boom")
    clock.move(1)
    assert source.delayed_count("out") == 0
    result = drive.commit(number, work)
    assert (result.done, result.outputs) == ((20, 40) if exact else (19, 38))
    assert drive.commit(number, work).repeated
    waiting = {w.payload["n"]: w for w in source.delayed("out")}
    assert sorted(waiting) == [n for n in range(20) if exact or n != 19]
    assert waiting[5].deliver_at == clock() + timedelta(seconds=6)
    assert waiting[4].deliver_at == clock() - timedelta(seconds=1) + timedelta(hours=5)
    assert waiting[4].headers == {"n": "4"}
    assert len(published(source)) == len(waiting)


def test_what_was_not_run_is_given_back_with_what_is_behind_it(source: custody.Custody) -> None:
    publish(source, 50)
    drive, _ = source.drive("in", "g")
    number = drive.claim(1000).number or 0
    everything = messages(source, drive, number)
    left = [message for message in everything if message.payload["n"] == 5]
    work = BatchReport(exact=False, placed=stage(source, drive, number, everything))
    work.left = {left[0].partition: [left[0].offset]}
    result = drive.commit(number, work)
    assert (result.done, result.released, result.failed) == (41, 9, 0)
    claim = drive.claim(1000)
    assert claim.messages == 9
    drive.commit(claim.number or 0, run(source, drive, claim.number or 0))
    assert sorted(n for _, n in published(source)) == list(range(50))
    assert_in_key_order(published(source))


def test_a_newer_driver_fences_the_older_one_and_adopts_its_claim(source: custody.Custody) -> None:
    publish(source, 20)
    old, _ = source.drive("in", "g")
    number = old.claim(1000).number or 0
    work = run(source, old, number)
    new, _ = source.drive("in", "g")
    for verb in (lambda: old.claim(10), old.keep, old.release, lambda: old.commit(number, work)):
        with pytest.raises(PipelineFenced, match=r"epoch \d+\), not by epoch"):
            verb()
    assert published(source) == []
    assert new.claim(1000).number == number
    assert new.commit(number, run(source, new, number)).outputs == 20
    assert len(published(source)) == 20


def test_a_commit_never_takes_another_claim_for_its_own(source: custody.Custody) -> None:
    publish(source, 20)
    drive, _ = source.drive("in", "g")
    drive.commit(1, run(source, drive, drive.claim(10).number or 0))
    assert drive.claim(10).number == 2
    assert drive.commit(1, BatchReport()).repeated
    assert source.stats("in", "g").in_flight == 10, "claim 2 is still to be run"
    with pytest.raises(ClaimLost):
        drive.commit(3, BatchReport())


def test_a_lost_stage_refuses_the_commit(source: custody.Custody, db: psycopg.Connection) -> None:
    """A crash of the server empties unlogged tables: 0 of 20 rows must never count as 20 done without output."""
    publish(source, 20)
    drive, _ = source.drive("in", "g")
    number = drive.claim(1000).number or 0
    for exact in (True, False):
        work = run(source, drive, number)
        work.exact = exact
        db.execute(f"TRUNCATE custody.{stage_of(drive.driver.group_id, number)}".encode())
        with pytest.raises(StageLost, match="0 of"):
            drive.commit(number, work)
    assert source.stats("in", "g").in_flight == 20
    assert drive.commit(number, run(source, drive, number)).outputs == 20


def test_attempts_that_do_not_count_are_never_published(source: custody.Custody) -> None:
    publish(source, 20)
    drive, _ = source.drive("in", "g")
    number = drive.claim(1000).number or 0
    run(source, drive, number)
    work = run(source, drive, number)
    run(source, drive, number)
    assert drive.commit(number, work).outputs == 20
    assert len(published(source)) == 20


def test_a_lease_that_was_lost_publishes_nothing(source: custody.Custody) -> None:
    publish(source, 40)
    drive, _ = source.drive("in", "g")
    number = drive.claim(1000).number or 0
    work = run(source, drive, number)
    gone = source.rewind("in", "g", to_offset=0, partition=0)[0].messages
    result = drive.commit(number, work)
    assert result.lost == gone
    assert (result.done, result.outputs) == (40 - gone, 40 - gone)
    claim = drive.claim(1000)
    assert claim.messages == gone
    drive.commit(claim.number or 0, run(source, drive, claim.number or 0))
    assert sorted(n for _, n in published(source)) == list(range(40))


def test_a_claim_that_was_taken_away_whole_is_forgotten(source: custody.Custody, clock: Clock) -> None:
    publish(source, 40)
    drive, _ = source.drive("in", "g")
    number = drive.claim(1000).number or 0
    work = run(source, drive, number)
    clock.move(31)
    claim = drive.claim(1000)
    assert (claim.number, claim.messages) == (number + 1, 40)
    with pytest.raises(ClaimLost):
        drive.commit(number, work)
    assert drive.commit(claim.number or 0, run(source, drive, claim.number or 0)).outputs == 40
    attempts = {entry.attempt for entry in source.trace("in", 0, 0) if entry.kind == "claim"}
    assert attempts == {1, 2}


def test_a_dead_driver_charges_nobody_however_few_it_held(source: custody.Custody, clock: Clock) -> None:
    publish(source, 1)
    for _ in range(5):
        drive, _ = source.drive("in", "g")
        assert drive.claim(10).messages == 1
        clock.move(31)
    drive, _ = source.drive("in", "g")
    claim = drive.claim(10)
    assert source.stats("in", "g").dead == 0
    drive.commit(claim.number or 0, run(source, drive, claim.number or 0))
    assert published(source) == [("k0", 0)]


def test_keeping_a_claim_outlives_the_visibility_timeout(source: custody.Custody, clock: Clock) -> None:
    publish(source, 10)
    drive, _ = source.drive("in", "g")
    number = drive.claim(1000).number or 0
    for _ in range(5):
        clock.move(20)
        assert drive.keep() == 10
    assert drive.commit(number, run(source, drive, number)).done == 10


def test_a_released_claim_costs_no_attempt(source: custody.Custody) -> None:
    publish(source, 10)
    drive, _ = source.drive("in", "g")
    assert drive.claim(1000).number == 1
    assert drive.release()
    assert not drive.release()
    assert drive.claim(1000).number == 2
    assert all(message.attempt <= 1 for message in messages(source, drive, 2))
    assert source.stats("in", "g").in_flight == 10


def test_one_pass_takes_what_was_there_and_due_at_its_start(source: custody.Custody, clock: Clock) -> None:
    publish(source, 20)
    drive, only = source.drive("in", "g")
    publish(source, 5)
    clock.move(1)
    claim = drive.claim(1000, only)
    assert claim.messages == 20
    drive.commit(claim.number or 0, run(source, drive, claim.number or 0, {3: Outcome("later", delay="0s")}))
    assert drive.claim(1000, only).reason == "empty"
    assert drive.claim(1000, PassLimit(until=only.until, due=None)).messages == 1


def test_a_paused_group_gives_nothing(source: custody.Custody) -> None:
    publish(source, 20)
    source.pause("in", "g")
    drive, _ = source.drive("in", "g")
    assert drive.claim(1000).reason == "paused"


def test_malformed_messages_are_dead_and_the_rest_goes_on(source: custody.Custody) -> None:
    publish(source, 20)
    drive, _ = source.drive("in", "g")
    number = drive.claim(1000).number or 0
    everything = messages(source, drive, number)
    bad = everything[3]
    task(source, drive, number).note_malformed([(bad.partition, bad.offset, "not JSON")] * 2)
    good = [message for message in everything if message is not bad]
    result = drive.commit(number, BatchReport(placed=stage(source, drive, number, good), ran=len(good)))
    assert (result.done, result.dead, result.outputs) == (19, 1, 19)
    assert source.dead("in", "g")[0].last_error == "not JSON"


@pytest.mark.parametrize("leased", [30_000, pytest.param(300_000, marks=pytest.mark.long)])
def test_what_a_dead_driver_held_costs_the_next_claim_next_to_nothing(
    c: custody.Custody, db: psycopg.Connection, clock: Clock, leased: int
) -> None:
    """However much it was, it comes back as a range: no row is written, and none is read, for each message."""
    c.create_topic("in", partitions=2)
    c.create_group("in", "g", ORDERED)
    for first in range(0, leased // 2, 15_000):
        numbers = range(first, min(first + 15_000, leased // 2))
        for partition in range(2):
            c.publish_many(
                "in", [custody.Outgoing(b"", key=f"k{n % 999}", partition=partition, allow_split=True) for n in numbers]
            )
    drive, _ = c.drive("in", "g")
    assert drive.claim(leased).messages == leased
    clock.move(60)
    again, _ = c.drive("in", "g")
    before = time.perf_counter()
    assert again.claim(1000).messages == 1000
    print(f"the first claim after {leased:,} leased messages: {(time.perf_counter() - before) * 1000:.1f} ms")
    for table, most in {"leases": 2, "returned": 2, "cases": 0}.items():
        assert (db.execute(f"SELECT count(*) FROM custody.{table}".encode()).fetchone() or (0,))[0] <= most


def test_what_a_task_left_is_given_back_whatever_the_policy_says_by_then(source: custody.Custody) -> None:
    """A task skips what is behind a dead one of a held key; the policy is changed before the commit."""
    source.update_group("in", "g", custody.Policy(ordering="key", on_dead="hold"))
    source.publish_many("in", [custody.Outgoing({"n": n}, key="k", partition=0) for n in range(3)])
    drive, _ = source.drive("in", "g")
    number = drive.claim(10).number or 0
    work = BatchReport(failed={(0, 0): Outcome("dead", error="never")}, left={0: [1, 2]})
    source.update_group("in", "g", custody.Policy(ordering="key", on_dead="release"))
    result = drive.commit(number, work)
    assert (result.done, result.dead, result.released) == (0, 1, 2)
    assert drive.claim(10).messages == 2


def test_a_driver_that_starts_again_does_not_push_out_a_newer_one(source: custody.Custody) -> None:
    old, _ = source.drive("in", "g")
    again, _ = source.drive("in", "g", after=old.driver.epoch)
    assert again.driver.epoch > old.driver.epoch
    newer, _ = source.drive("in", "g")
    with pytest.raises(PipelineFenced):
        source.drive("in", "g", after=again.driver.epoch)
    assert newer.claim(10).reason == "empty"


def test_a_new_driver_judges_by_its_own_schema(source: custody.Custody) -> None:
    publish(source, 3)
    old, _ = source.drive("in", "g")
    number = old.claim(10).number or 0
    bad = messages(source, old, number)[0]
    task(source, old, number).note_malformed([(bad.partition, bad.offset, "not JSON")])
    new, _ = source.drive("in", "g")
    assert new.claim(10).number == number
    assert new.commit(number, run(source, new, number)).done == 3


def test_what_the_tasks_say_of_a_malformed_message_comes_first(source: custody.Custody) -> None:
    publish(source, 3)
    drive, _ = source.drive("in", "g")
    number = drive.claim(10).number or 0
    bad = messages(source, drive, number)[0]
    task(source, drive, number).note_malformed([(bad.partition, bad.offset, "not JSON")])
    result = drive.commit(number, run(source, drive, number, {bad.payload["n"]: Outcome("nack", error="no")}))
    assert (result.failed, result.dead) == (1, 0)


def test_no_partition_starves_when_less_is_claimed_than_there_are_partitions(c: custody.Custody) -> None:
    c.create_topic("in", partitions=4)
    c.create_group("in", "g")
    c.publish_many("in", [custody.Outgoing(n, partition=0) for n in range(1000)])
    drive, _ = c.drive("in", "g")
    taken = set()
    for _ in range(30):
        for partition in (1, 2, 3):
            c.publish("in", 0, partition=partition)
        number = drive.claim(3).number or 0
        taken |= {part.partition for part in drive.claimed(number)}
        drive.commit(number, BatchReport())
    assert taken == {0, 1, 2, 3}


@pytest.mark.req("S4")
def test_an_old_driver_does_not_drive_a_group_that_was_made_anew(source: custody.Custody) -> None:
    old, _ = source.drive("in", "g")
    source.delete_group("in", "g")
    source.create_group("in", "g", ORDERED)
    source.publish("in", 1)
    new, _ = source.drive("in", "g")
    assert new.driver.uid != old.driver.uid
    with pytest.raises(PipelineFenced):
        old.claim(10)
    assert new.claim(10).messages == 1


def test_a_commit_at_the_deadline_publishes_nothing(
    source: custody.Custody, db: psycopg.Connection, clock: Clock
) -> None:
    """Nobody has folded the leases yet."""
    publish(source, 10)
    drive, _ = source.drive("in", "g")
    number = drive.claim(1000).number or 0
    work = run(source, drive, number)
    left = "SELECT custody.claim_left(group_id, claim, 0, %s) FROM custody.pipeline_claims"
    clock.move(29)
    assert db.execute(left, [clock()]).fetchall() == [(1.0,)]
    clock.move(1)
    assert db.execute(left, [clock()]).fetchall() == [(None,)]
    result = drive.commit(number, work)
    assert (result.done, result.lost, result.outputs) == (0, 10, 0)


def test_what_others_hold_is_not_counted_to_a_claim(source: custody.Custody) -> None:
    publish(source, 9)
    source.create_group("in", "other")
    assert source.claim("in", "other", max_messages=100)
    drive, _ = source.drive("in", "g")
    number = drive.claim(4).number or 0
    assert drive.keep() == 4
    assert drive.commit(number, run(source, drive, number)).done == 4


def test_results_of_a_driver_that_was_fenced_are_not_committed_by_the_next(source: custody.Custody) -> None:
    publish(source, 4)
    old, _ = source.drive("in", "g")
    number = old.claim(1000).number or 0
    old.begin_write(number, run(source, old, number), "old", ["files"])
    new, _ = source.drive("in", "g")
    assert new.commit(number, run(source, new, number)).done == 4
    assert [(write.token, write.committed) for write in new.open_writes()] == [("old", False)]


def test_a_claim_that_copies_a_death_gives_nobody_else_more_time(
    c: custody.Custody, db: psycopg.Connection, clock: Clock
) -> None:
    c.create_topic("in")
    c.create_group("in", "g", custody.Policy(dead_letter="topic", max_attempts=1))
    c.create_group("in", "other")
    c.publish_many("in", [custody.Outgoing(n) for n in range(3)])
    deadline = c.claim("in", "other", visibility_timeout=300).deadline
    assert c.claim("in", "g")
    drive, _ = c.drive("in", "g")
    clock.move(31)
    assert drive.claim(10).messages == 2
    assert len(c.dead("in", "g")) == 1
    deadlines = {row for (row,) in db.execute("SELECT deadline FROM custody.leases").fetchall()}
    assert deadlines == {deadline, clock() + timedelta(seconds=30)}
