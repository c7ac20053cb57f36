"""What operators do beside workers: redrive, rewind, skip and release, each decided under the cursor's lock."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from tests.conftest import Clock
from tests.interleaving.conftest import Make
from tests.interleaving.session import GROUP, TOPIC, Session
from tests.waiting import wait_for

import custody

pytestmark = pytest.mark.core


def kill(one: Session, *offsets: int) -> None:
    """Claims and rejects: the messages named are dead, the others of the claim done."""
    lease = one.claim(max(offsets) + 1)
    one.settle(lease.lease_id, {offset: "dead" if offset in offsets else "ack" for offset in lease.offsets})
    one.commit()


@pytest.mark.req("V8")
def test_trap_1_3_redrive_waits_for_a_claim_and_obeys_the_order_rule(make: Make, one: Session, two: Session) -> None:
    """Trap 1.3: K@0 is dead and released, K@1 in flight. Redriven, K@0 must not go beside it."""
    make("KKK")
    kill(one, 0)
    lease = one.claim(1)
    assert lease.offsets == [1]
    redriving = two.blocked(two.redrive)
    one.commit()
    assert redriving.result(10) == [(0, 0)]
    two.commit()
    assert two.claim(9).offsets == []
    two.commit()
    assert one.ack(lease.lease_id, 1).lost == []
    one.commit()
    again = two.claim(9)
    assert again.attempts[0] == 1  # and a fresh budget
    assert again.offsets == sorted(again.offsets)
    assert 1 not in again.offsets


def test_claim_waits_for_a_redrive_and_hands_it_out(make: Make, one: Session, two: Session) -> None:
    make("Ka")
    kill(one, 0)
    one.redrive()
    claiming = two.blocked(two.claim, 9)
    one.commit()
    assert claiming.result(10).attempts == {0: 1, 1: 1}


@pytest.mark.req("V8")
def test_two_redrives_at_once_redrive_once(make: Make, c: custody.Custody, one: Session, two: Session) -> None:
    make("Ka")
    kill(one, 0)
    assert one.redrive() == [(0, 0)]
    second = two.blocked(two.redrive)
    one.commit()
    assert second.result(10) == []
    two.commit()
    assert [entry.kind for entry in c.trace(TOPIC, 0, 0)].count("redrive") == 1


def test_redrive_that_waited_takes_what_died_meanwhile(
    make: Make, c: custody.Custody, one: Session, two: Session, clock: Clock
) -> None:
    """It decides after it has its locks: what it redrives is what was dead then."""
    make("ab", max_attempts=1)
    one.claim(1, visibility=5)
    one.commit()
    clock.move(6)
    assert one.claim(1).offsets == [1]  # the fold, not committed, makes the first one dead
    redriving = two.blocked(two.redrive)
    one.commit()
    assert redriving.result(10) == [(0, 0)]
    two.commit()
    assert c.dead(TOPIC, GROUP) == []
    assert two.claim(9).attempts == {0: 1}


@pytest.mark.req("V9")
def test_rewind_waits_for_an_open_settle_and_takes_all_of_it_back(
    make: Make, c: custody.Custody, one: Session, two: Session
) -> None:
    make("abcd")
    lease = one.claim(4)
    one.commit()
    one.settle(lease.lease_id, {0: "ack", 1: "nack", 2: "release", 3: "dead"})
    rewinding = two.blocked(two.rewind, 0)
    one.commit()
    assert rewinding.result(10) == [(0, 0, 4)]
    two.commit()
    assert c.dead(TOPIC, GROUP) == []
    assert two.claim(9).attempts == {0: 1, 1: 1, 2: 1, 3: 1}


@pytest.mark.req("V9", "G14")
def test_trap_1_12_late_ack_behind_a_rewind_is_lost(make: Make, c: custody.Custody, one: Session, two: Session) -> None:
    """Trap 1.12: a table was emptied and the group rewound; the old lease's ack must not make anything done."""
    make("abc")
    lease = one.claim(2)
    one.commit()
    two.rewind(0)
    acking = one.blocked(one.ack, lease.lease_id, 0, 1)
    two.commit()
    assert acking.result(10).lost == [0, 1]
    one.commit()
    assert one.ack_lease(lease.lease_id).settled == 0
    one.commit()
    assert c.stats(TOPIC, GROUP).depth == 3
    assert one.claim(9).attempts == {0: 1, 1: 1, 2: 1}


def test_rewind_into_a_lease_revokes_only_what_lies_beyond_its_target(make: Make, one: Session, two: Session) -> None:
    make("abcd")
    lease = one.claim(4)
    one.commit()
    two.rewind(2)
    two.commit()
    outcome = one.ack(lease.lease_id, 0, 1, 2, 3)
    assert (outcome.settled, outcome.lost) == (2, [2, 3])
    one.commit()
    assert two.claim(9).attempts == {2: 1, 3: 1}


def test_rewind_waits_for_a_claim_and_revokes_it(make: Make, one: Session, two: Session) -> None:
    make("ab")
    lease = one.claim(2)
    rewinding = two.blocked(two.rewind, 0)
    one.commit()
    assert rewinding.result(10) == [(0, 0, 2)]
    two.commit()
    assert one.ack(lease.lease_id, 0, 1).lost == [0, 1]


def test_claim_waits_for_a_rewind_and_starts_again(make: Make, one: Session, two: Session) -> None:
    make("abc")
    lease = one.claim(2)
    one.ack_lease(lease.lease_id)
    one.commit()
    one.rewind(0)
    claiming = two.blocked(two.claim, 2)
    one.commit()
    assert claiming.result(10).attempts == {0: 1, 1: 1}


@pytest.mark.req("V9", "K2")
def test_trap_1_2_rewind_over_an_open_case_keeps_the_order(make: Make, one: Session, two: Session) -> None:
    """Trap 1.2: the due case K@2 must not go before K@0, which the rewind returned."""
    make("KaK")
    lease = one.claim(2)
    one.ack_lease(lease.lease_id)
    lease = one.claim(1)
    one.nack(lease.lease_id, 2, delay=0)
    one.commit()
    one.rewind(0)
    claiming = two.blocked(two.claim, 1)
    one.commit()
    first = claiming.result(10)
    assert first.offsets == [0]
    two.commit()
    assert one.claim(9).offsets == [1]


@pytest.mark.req("K8")
def test_skip_waits_for_a_claim_and_refuses_what_is_in_flight(
    make: Make, one: Session, two: Session, clock: Clock
) -> None:
    make("K")
    lease = one.claim(1)
    one.nack(lease.lease_id, 0, delay=1)
    one.commit()
    clock.move(1)
    assert one.claim(1).offsets == [0]
    skipping = two.blocked(two.skip, 0)
    one.commit()
    with pytest.raises(psycopg.Error) as refused:
        skipping.result(10)
    assert refused.value.diag.message_detail == "not_skippable"


@pytest.mark.req("K8")
def test_claim_waits_for_a_skip_and_the_key_goes_on(make: Make, one: Session, two: Session) -> None:
    make("KaK")
    lease = one.claim(3)
    one.settle(lease.lease_id, {0: "nack", 1: "ack"}, delay=60)
    one.commit()
    one.skip(0)
    claiming = two.blocked(two.claim, 9, partition=0)
    one.commit()
    assert claiming.result(10).attempts == {2: 1}


@pytest.mark.req("K8")
def test_skip_beside_an_open_nack_is_refused(make: Make, one: Session, two: Session) -> None:
    make("K")
    lease = one.claim(1)
    one.commit()
    one.nack(lease.lease_id, 0)
    with pytest.raises(psycopg.Error) as refused:
        two.skip(0)
    assert refused.value.diag.message_detail == "not_skippable"
    two.rollback()
    one.commit()
    two.skip(0)


@pytest.mark.req("K8")
def test_release_key_waits_for_a_claim_and_the_next_one_goes_on(make: Make, one: Session, two: Session) -> None:
    make("KaK", on_dead="hold")
    lease = one.claim(1)
    one.settle(lease.lease_id, {0: "dead"})
    one.commit()
    assert one.claim(9).offsets == [1]  # K@2 is parked behind the held one
    releasing = two.blocked(two.release_key, "K")
    one.commit()
    assert releasing.result(10) == 1
    two.commit()
    assert one.claim(9).offsets == [2]


@pytest.mark.req("K8")
def test_claim_waits_for_release_key(make: Make, one: Session, two: Session) -> None:
    make("KaK", on_dead="hold")
    lease = one.claim(3)
    one.settle(lease.lease_id, {0: "dead", 1: "ack"})
    one.commit()
    assert one.release_key("K") == 1
    claiming = two.blocked(two.claim, 9, partition=0)
    one.commit()
    assert claiming.result(10).offsets == [2]


@pytest.mark.req("V8")
def test_a_dry_rewind_neither_waits_nor_holds_anybody_up(make: Make, one: Session, two: Session) -> None:
    make("abcd")
    one.ack_lease(one.claim(2).lease_id)
    one.commit()
    held = one.claim(1)  # its transaction holds the cursor
    two.connection.execute("SET lock_timeout = '2s'")
    assert two.call("rewind", topic=TOPIC, group=GROUP, to_offset=0, dry_run=True) == [(0, 0, 2)]
    one.commit()
    assert two.call("rewind", topic=TOPIC, group=GROUP, to_offset=1, dry_run=True) == [(0, 1, 2)]
    assert one.ack(held.lease_id, 2).lost == []
    assert one.claim(9).offsets == [3]  # while the dry run's transaction is open
    one.seal()


@pytest.mark.parametrize(
    ("verb", "arguments", "lock", "stamped"),
    [
        ("discard", {}, "custody.cursors", "max(at) FROM custody.journal WHERE kind = 'discard'"),
        ("release_key", {"key": "K"}, "custody.cursors", "max(at) FROM custody.journal WHERE kind = 'free'"),
        ("pause", {}, "custody.groups", "paused_at FROM custody.groups"),
        ("resume", {}, "custody.groups", "max(at) FROM custody.journal WHERE kind = 'resume'"),
        ("update_group", {"policy": "{}"}, "custody.groups", "max(at) FROM custody.journal WHERE kind = 'policy'"),
        ("create_group", {"policy": ...}, "custody.topics", "created_at FROM custody.groups WHERE name = 'new'"),
        ("seal_segment", {}, "custody.heads", "sealed_at FROM custody.segments ORDER BY segment_id LIMIT 1"),
    ],
)
def test_the_clock_is_read_after_the_locks(
    make: Make, one: Session, two: Session, verb: str, arguments: dict[str, Any], lock: str, stamped: str
) -> None:
    make("KK", on_dead="hold")
    kill(one, 0)
    if verb == "resume":
        one.call("pause", topic=TOPIC, group=GROUP)
        one.commit()
    if verb == "create_group":
        arguments = {"group": "new", "policy": json.dumps(custody.Policy().columns())}
    elif verb != "seal_segment":
        arguments = {"group": GROUP, **arguments}
    one.connection.execute(f"SELECT FROM {lock} FOR NO KEY UPDATE".encode())
    waiting = two.blocked(two.call, verb, topic=TOPIC, **arguments)
    unlocked = one.connection.execute("SELECT clock_timestamp()").fetchall()[0][0]
    one.commit()
    waiting.result(10)
    two.commit()
    assert one.connection.execute(f"SELECT {stamped}".encode()).fetchall()[0][0] >= unlocked


@pytest.mark.req("V9", "G14")
def test_a_rewind_that_waited_while_the_lease_was_split_takes_from_its_new_rows(
    make: Make, c: custody.Custody, one: Session, two: Session, three: Session
) -> None:
    """The new rows are locked too, before anything is taken from them: nothing changes them meanwhile."""
    make([None] * 600, ordering="none")
    lease = one.claim(600)
    one.commit()
    assert one.ack(lease.lease_id, 300).settled == 1  # splits the row in three
    rewinding = two.blocked(two.rewind, 255)
    one.commit()
    # it has locked what there is now: whoever settles the piece before the target waits for it
    assert rewinding.result(10) == [(0, 255, 345)]
    acking = three.blocked(three.ack, lease.lease_id, *range(256))
    two.commit()
    outcome = acking.result(10)
    assert (outcome.settled, outcome.lost) == (255, [255])
    three.commit()
    assert c.stats(TOPIC, GROUP).depth == 345


@pytest.mark.req("V9", "G14")
def test_a_rewind_beside_acks_in_pieces_never_breaks_a_lease(
    make: Make, c: custody.Custody, one: Session, two: Session, three: Session
) -> None:
    """A row that was made while the rewind waited is emptied, but for what is rewound, while it waits for another."""
    make([None] * 601, ordering="none")
    lease, other = one.claim(600), one.claim(1)
    one.commit()
    one.ack(lease.lease_id, 300)  # splits the row
    three.extend(other.lease_id, 60)
    rewinding = two.blocked(two.rewind, 255)  # for the row that is split
    one.commit()
    wait_for(lambda: two.waits_for(three), "the rewind does not go on to the other lease")
    one.ack(lease.lease_id, *range(255))
    three.commit()
    wait_for(lambda: two.waits_for(one), "the rewind does not look at the new row")
    one.commit()
    assert rewinding.result(10) == [(0, 255, 346)]
    two.commit()
    assert one.ack_lease(lease.lease_id).lost == [*range(255, 300), *range(301, 600)]
    assert c.stats(TOPIC, GROUP).in_flight == 0


@pytest.mark.req("V9")
def test_a_rewind_gives_up_soon_on_an_open_transaction_and_names_it(
    make: Make, c: custody.Custody, one: Session, two: Session, three: Session
) -> None:
    make([None] * 4, partitions=2)
    lease = one.claim(1)
    one.commit()
    one.ack_lease(lease.lease_id)  # and the transaction stays open
    with pytest.raises(psycopg.Error) as refused:
        two.rewind(0, wait=0.05)
    two.rollback()
    said = refused.value.diag
    assert said.message_detail == "busy"
    assert f"process {one.connection.info.backend_pid} of the database) has locked lease {lease.lease_id}" in str(
        said.message_primary
    )
    assert three.claim(1).offsets  # nobody holds a cursor any more
    three.commit()
    one.commit()
    assert two.rewind(0, wait=0.05)


@pytest.mark.req("V9")
def test_claims_go_on_while_a_rewind_is_tried_again(make: Make, c: custody.Custody, one: Session, two: Session) -> None:
    make([None] * 8, partitions=2)
    lease = one.claim(1)
    one.commit()
    one.ack_lease(lease.lease_id)
    with ThreadPoolExecutor(1) as pool:
        rewinding = pool.submit(c.rewind, TOPIC, GROUP, to_offset=0)
        for _ in range(3):
            wait_for(lambda: two.claim(1).offsets, "nothing can be claimed")
            two.commit()
            assert not rewinding.done()
        one.commit()
        assert sum(rewound.messages for rewound in rewinding.result(10)) == 4


@pytest.mark.req("V2")
def test_two_who_commit_a_position_of_a_bare_group_take_turns(
    make: Make, c: custody.Custody, one: Session, two: Session
) -> None:
    make("abc", group=False)
    c.create_group(TOPIC, GROUP, bare=True)

    def commit(session: Session, offset: int) -> object:
        return session.call("commit_position", topic=TOPIC, group=GROUP, partition=0, offset=offset)

    commit(one, 1)
    second = two.blocked(commit, two, 3)
    one.commit()
    second.result(10)
    two.commit()
    assert two.call("positions", topic=TOPIC, group=GROUP) == [(0, 3)]
    assert [entry.kind for entry in c.trace(TOPIC, 0, 0)].count("commit") == 1, "the second one began where it was then"
