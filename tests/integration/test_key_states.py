"""States of keys, without Spark: what a task reads and stages, and what the commit makes of it."""

from __future__ import annotations

import secrets
from datetime import timedelta

import psycopg
import pytest
from tests.conftest import Clock

import custody
from custody.errors import ClaimLost, InvalidArgument, PipelineFenced, PipelineRefused, StageLost
from custody.model.outcomes import Outcome
from custody.spark.database.states import ClaimStates
from custody.spark.database.tasks import TaskClaim
from custody.verbs.pipelines import BatchReport, DriverVerbs, stage_of
from custody.verbs.settle import offset_set

pytestmark = [pytest.mark.core, pytest.mark.req("X8")]

ORDERED = custody.Policy(ordering="key", max_attempts=3, backoff=custody.Constant("10s"))


@pytest.fixture
def source(c: custody.Custody) -> custody.Custody:
    c.create_topic("in", partitions=2)
    c.create_group("in", "g", ORDERED)
    return c


def publish(c: custody.Custody, numbers: list[int], keys: int = 3) -> None:
    c.publish_many("in", [custody.Outgoing({"n": n}, key=f"k{n % keys}") for n in numbers])


def messages(c: custody.Custody, drive: DriverVerbs, number: int) -> list[custody.Message]:
    return [
        message
        for part in drive.claimed(number)
        for first, last in part.ranges
        for message in c.read("in", part.partition, offset=first, max_messages=last - first)
    ]


def attempt(c: custody.Custody, drive: DriverVerbs, number: int, ttl: float | None = None) -> ClaimStates:
    return ClaimStates(TaskClaim(c.database_url, drive.driver.group_id, number), secrets.randbits(62), ttl)


def run(
    c: custody.Custody,
    drive: DriverVerbs,
    number: int,
    failing: dict[int, Outcome] | None = None,
    ttl: float | None = None,
) -> BatchReport:
    """What a batch reports that sums up the numbers of each key."""
    work, stopped = BatchReport(), set()
    states, known = attempt(c, drive, number, ttl), {}
    for message in messages(c, drive, number):
        assert message.key is not None
        if message.key in stopped:
            work.left.setdefault(message.partition, []).append(message.offset)
            continue
        outcome = (failing or {}).get(message.payload["n"])
        if outcome is not None:
            work.failed[message.partition, message.offset] = outcome
            if outcome.stops_key("release"):
                stopped.add(message.key)
            continue
        if message.key not in known:
            stored = states.read(message.partition, [message.key])[message.key].state
            known[message.key] = 0 if stored is None else int(stored)
        known[message.key] += message.payload["n"]
        states.add(message.partition, message.offset, message.key, str(known[message.key]).encode())
        work.ran += 1
    staged = states.write()
    work.states = [] if staged is None else [staged]
    return work


def sums(c: custody.Custody) -> dict[str, int]:
    return {one.key: one.state for one in c.key_states("in", "g")}


def of(numbers: list[int], keys: int = 3) -> dict[str, int]:
    return {f"k{key}": sum(n for n in numbers if n % keys == key) for key in range(keys)}


def test_a_state_is_read_staged_and_committed_with_its_messages(source: custody.Custody, clock: Clock) -> None:
    publish(source, [*range(30)])
    drive, _ = source.drive("in", "g")
    number = drive.claim(1000).number or 0
    work = run(source, drive, number)
    assert sums(source) == {}, "nothing is seen before the commit"
    assert drive.commit(number, work).done == 30
    assert sums(source) == of([*range(30)])
    publish(source, [*range(30, 40)])
    clock.move(5)
    number = drive.claim(1000).number or 0
    drive.commit(number, run(source, drive, number))
    assert sums(source) == of([*range(40)])
    last = next(one for one in source.key_states("in", "g", key="k0"))
    message = source.read("in", last.partition, offset=last.offset, max_messages=1)[0]
    assert (message.payload["n"], last.claim, last.updated_at, last.expires_at) == (39, 2, clock(), None)


def test_a_failed_message_leaves_the_state_before_it(source: custody.Custody) -> None:
    publish(source, [*range(12)])
    drive, _ = source.drive("in", "g")
    number = drive.claim(1000).number or 0
    failing = {3: Outcome("nack", error="no"), 4: Outcome("dead", error="no"), 5: Outcome("skip")}
    committed = drive.commit(number, run(source, drive, number, failing))
    assert (committed.failed, committed.dead, committed.skipped, committed.released) == (2, 1, 1, 2)
    assert sums(source) == {"k0": 0, "k1": 1 + 7 + 10, "k2": 2 + 8 + 11}


def test_a_message_that_is_refused_after_it_ran_takes_its_state_back(source: custody.Custody) -> None:
    """As when a sink outside refuses it: the task has counted it as done, and what comes behind it, too."""
    publish(source, [*range(12)])
    drive, _ = source.drive("in", "g")
    number = drive.claim(1000).number or 0
    work = run(source, drive, number)
    refused = next(one for one in messages(source, drive, number) if one.payload["n"] == 6)
    work.failed[refused.partition, refused.offset] = Outcome("nack", error="refused")
    committed = drive.commit(number, work)
    assert (committed.done, committed.failed, committed.released) == (10, 1, 1)
    assert sums(source) == of([*range(12)]) | {"k0": 0 + 3}


def test_a_lost_message_takes_its_state_back_and_what_is_behind_it(
    source: custody.Custody, db: psycopg.Connection
) -> None:
    publish(source, [*range(12)])
    drive, _ = source.drive("in", "g")
    number = drive.claim(1000).number or 0
    work = run(source, drive, number)
    lost = next(one for one in messages(source, drive, number) if one.payload["n"] == 6)
    gone = offset_set([lost.offset])
    db.execute(
        "UPDATE custody.leases SET held = held - %s::int8multirange, remaining = remaining - 1 WHERE partition = %s",
        [gone, lost.partition],
    )
    committed = drive.commit(number, work)
    assert (committed.done, committed.lost, committed.released) == (10, 1, 1)
    assert sums(source) == of([*range(12)]) | {"k0": 0 + 3}


def test_a_rewind_while_a_batch_runs_takes_the_states_back(source: custody.Custody, clock: Clock) -> None:
    publish(source, [*range(12)])
    drive, _ = source.drive("in", "g")
    number = drive.claim(1000).number or 0
    work = run(source, drive, number)
    parts = drive.claimed(number)
    for part in parts:
        source.rewind("in", "g", to_offset=2, partition=part.partition)
    assert drive.commit(number, work).done == 2 * len(parts)
    while claim := drive.claim(1000).number:
        drive.commit(claim, run(source, drive, claim))
    assert sums(source) == of([*range(12)]), "each message is applied once"


def test_a_repeated_commit_applies_nothing_twice(source: custody.Custody) -> None:
    publish(source, [*range(9)])
    drive, _ = source.drive("in", "g")
    number = drive.claim(1000).number or 0
    work = run(source, drive, number)
    drive.commit(number, work)
    drive.drop_states(number)
    assert drive.commit(number, work).repeated
    assert sums(source) == of([*range(9)])


def test_what_an_attempt_that_died_has_staged_is_never_read(source: custody.Custody) -> None:
    publish(source, [*range(9)])
    drive, _ = source.drive("in", "g")
    number = drive.claim(1000).number or 0
    dead = attempt(source, drive, number)
    for message in messages(source, drive, number):
        dead.read(message.partition, [message.key or ""])
        dead.add(message.partition, message.offset, message.key or "", b"1000000")
    assert dead.write() is not None
    drive.commit(number, run(source, drive, number))
    assert sums(source) == of([*range(9)])


def test_a_fenced_driver_changes_no_state(source: custody.Custody) -> None:
    publish(source, [*range(9)])
    old, _ = source.drive("in", "g")
    number = old.claim(1000).number or 0
    work = run(source, old, number)
    new, _ = source.drive("in", "g")
    with pytest.raises(PipelineFenced):
        old.commit(number, work)
    assert sums(source) == {}
    new.commit(number, run(source, new, number))
    assert sums(source) == of([*range(9)])
    with pytest.raises(ClaimLost):
        attempt(source, old, number).read(0, ["k0"])


def test_states_that_are_missing_in_the_stage_are_refused(source: custody.Custody, db: psycopg.Connection) -> None:
    """An unlogged table is empty after a crash of the database."""
    publish(source, [*range(9)])
    drive, _ = source.drive("in", "g")
    number = drive.claim(1000).number or 0
    work = run(source, drive, number)
    db.execute(f"TRUNCATE custody.{stage_of(drive.driver.group_id, number)}_states")
    with pytest.raises(StageLost, match="0 of 9 staged states"):
        drive.commit(number, work)
    drive.drop_states(number)
    with pytest.raises(StageLost, match="0 of 9 staged states"):
        drive.commit(number, work)
    assert drive.commit(number, run(source, drive, number)).done == 9


def test_a_state_can_be_cleared(source: custody.Custody) -> None:
    publish(source, [0, 1, 2])
    drive, _ = source.drive("in", "g")
    number = drive.claim(1000).number or 0
    drive.commit(number, run(source, drive, number))
    publish(source, [3, 4])
    number = drive.claim(1000).number or 0
    states = attempt(source, drive, number)
    for message in messages(source, drive, number):
        assert message.key is not None
        states.read(message.partition, [message.key])
        states.add(message.partition, message.offset, message.key, None)
    staged = states.write()
    assert staged is not None
    drive.commit(number, BatchReport(states=[staged], ran=2))
    assert sums(source) == {"k2": 2}


def test_a_state_that_was_not_updated_for_its_ttl_is_absent_and_upkeep_removes_it(
    source: custody.Custody, clock: Clock, db: psycopg.Connection
) -> None:
    publish(source, [0, 1, 2])
    drive, _ = source.drive("in", "g")
    began = clock()
    number = drive.claim(1000).number or 0
    drive.commit(number, run(source, drive, number, ttl=60))
    assert {one.expires_at for one in source.key_states("in", "g")} == {began + timedelta(seconds=60)}
    clock.move(50)
    publish(source, [3])
    number = drive.claim(1000).number or 0
    clock.move(20)
    states = attempt(source, drive, number)
    assert states.read(messages(source, drive, number)[0].partition, ["k0", "k1"])["k1"].state == b"1"
    source.maintain()

    def stored() -> list[object]:
        return [key for (key,) in db.execute("SELECT key FROM custody.key_states ORDER BY key")]

    assert stored() == ["k0", "k1", "k2"], "the claim in flight is older"
    drive.commit(number, run(source, drive, number, ttl=60))
    assert sums(source) == {"k0": 3}
    source.maintain()
    assert stored() == ["k0"]
    clock.move(60)
    publish(source, [6])
    number = drive.claim(1000).number or 0
    drive.commit(number, run(source, drive, number, ttl=60))
    assert sums(source) == {"k0": 6}, "it began anew"


def test_states_are_listed_in_pages_and_removed(source: custody.Custody) -> None:
    publish(source, [*range(10)], keys=10)
    drive, _ = source.drive("in", "g")
    number = drive.claim(1000).number or 0
    drive.commit(number, run(source, drive, number))
    first = source.key_states("in", "g", limit=4)
    rest = source.key_states("in", "g", after=first[-1].key)
    assert [one.state for one in (*first, *rest)] == [*range(10)]
    assert source.delete_key_states("in", "g", key="k3") == 1
    assert source.delete_key_states("in", "g", key="k3") == 0
    assert source.key_states("in", "g", key="k3") == []
    assert source.delete_key_states("in", "g", every=True) == 9
    for wrong in ({}, {"key": "k", "every": True}):
        with pytest.raises(InvalidArgument, match="either a key"):
            source.delete_key_states("in", "g", **wrong)  # type: ignore[arg-type]


def test_a_batch_that_has_read_removed_states_runs_again(source: custody.Custody) -> None:
    publish(source, [0, 1, 2])
    drive, _ = source.drive("in", "g")
    number = drive.claim(1000).number or 0
    drive.commit(number, run(source, drive, number))
    publish(source, [3, 4, 5])
    number = drive.claim(1000).number or 0
    work = run(source, drive, number)
    source.delete_key_states("in", "g", every=True)
    with pytest.raises(StageLost, match="were removed meanwhile"):
        drive.commit(number, work)
    drive.commit(number, run(source, drive, number))
    assert sums(source) == {"k0": 3, "k1": 4, "k2": 5}


def test_states_go_with_their_group(source: custody.Custody) -> None:
    publish(source, [0, 1, 2])
    drive, _ = source.drive("in", "g")
    number = drive.claim(1000).number or 0
    drive.commit(number, run(source, drive, number))
    source.delete_group("in", "g")
    source.create_group("in", "g", ORDERED)
    assert sums(source) == {}


def test_a_group_whose_keys_have_no_order_is_refused(c: custody.Custody) -> None:
    c.create_topic("in", partitions=2)
    c.create_group("in", "g", custody.Policy())
    drive, _ = c.drive("in", "g")
    with pytest.raises(PipelineRefused, match="no order by key"):
        drive.require_keyed()
    c.create_topic("lanes", priorities=True)
    c.create_group("lanes", "g", ORDERED)
    drive, _ = c.drive("lanes", "g")
    with pytest.raises(PipelineRefused, match="has priorities"):
        drive.require_keyed()


def test_a_topic_that_has_grown_is_refused_where_keys_have_moved(source: custody.Custody) -> None:
    source.delete_group("in", "g")
    publish(source, [*range(6)])
    source.change_topic("in", partitions=4)
    source.create_group("in", "old", ORDERED)
    source.create_group("in", "new", ORDERED, start="latest")
    drive, _ = source.drive("in", "old")
    with pytest.raises(PipelineRefused, match="has grown"):
        drive.require_keyed()
    drive, _ = source.drive("in", "new")
    drive.require_keyed()


def test_a_key_in_a_foreign_partition_is_told_apart(source: custody.Custody) -> None:
    drive, _ = source.drive("in", "g")
    own = source.publish("in", {"n": 0}, key="k0").partition
    source.publish_many("in", [custody.Outgoing({"n": 1}, key="k0", partition=1 - own, allow_split=True)])
    number = drive.claim(1000).number or 0
    states = attempt(source, drive, number)
    assert states.read(own, ["k0"])["k0"].own
    assert not states.read(1 - own, ["k0"])["k0"].own
