"""K2 to K7: what breaks order in retry topics with a lock topic, and why it cannot happen here."""

from __future__ import annotations

from collections.abc import Callable

import psycopg
import pytest
from tests.conftest import Clock
from tests.interleaving.conftest import Make
from tests.interleaving.session import GROUP, TOPIC, Session
from tests.order_rule import audit

import custody

pytestmark = pytest.mark.core


@pytest.mark.req("K2")
def test_k2_order_holds_through_every_later_failure(
    make: Make, db: psycopg.Connection, session: Callable[[str], Session], clock: Clock
) -> None:
    """Four workers, each failure by another one; an expiry, a redrive and a rewind on the way."""
    make("KaKbKcK", max_attempts=3)
    workers = [session(f"worker {n}") for n in range(4)]
    handled: list[int] = []

    def turn(worker: Session, outcome: str) -> list[int]:
        claimed = worker.claim(1)
        if claimed.offsets and outcome != "expire":
            worker.settle(claimed.lease_id, dict.fromkeys(claimed.offsets, outcome), delay=5)
        worker.commit()
        return claimed.offsets

    for n, outcome in enumerate(["nack", "nack", "expire"]):
        assert turn(workers[n], outcome) == [0], "K's later messages wait through its first, second and third failure"
        # meanwhile the others go on
        turn(workers[3], "ack")
        clock.move(31)
    workers[0].redrive()
    workers[0].commit()
    for n in range(40):
        handled += turn(workers[n % 4], "nack" if n % 3 == 0 else "ack")
        clock.move(2)
    workers[1].rewind(0)
    workers[1].commit()
    again = [offset for n in range(12) for offset in turn(workers[n % 4], "ack")]
    assert again == list(range(7))
    verdict = audit(db, TOPIC, GROUP)
    assert verdict.violations == []
    assert handled


@pytest.mark.req("K3")
def test_k3_the_failure_and_the_block_are_one_row_in_one_transaction(
    make: Make, c: custody.Custody, one: Session, two: Session
) -> None:
    make("KaK")
    lease = one.claim(1)
    one.commit()
    one.nack(lease.lease_id, 0, delay=5)
    # rolled back, there is neither a failure nor a block of its own: only the lease
    one.rollback()
    assert [(key.key, key.why) for key in c.blocked_keys(TOPIC, GROUP)] == []
    one.nack(lease.lease_id, 0, delay=5)
    one.commit()
    (blocked,) = c.blocked_keys(TOPIC, GROUP)
    assert (blocked.key, blocked.blocked_by, blocked.why, blocked.last_error) == ("K", 0, "backoff", "boom")
    assert one.connection.execute("SELECT count(*) FROM custody.cases").fetchone() == (1,)
    assert two.claim(9).offsets == [1]


@pytest.mark.req("K4")
def test_k4_two_failures_and_one_success_leave_the_key_blocked(make: Make, one: Session, clock: Clock) -> None:
    make("KaKbK")
    lease = one.claim(1)
    one.nack(lease.lease_id, 0, delay=1)
    assert one.claim(9).offsets == [1, 3]
    clock.move(1)
    lease = one.claim(1)
    assert lease.offsets == [0]
    one.ack_lease(lease.lease_id)  # the first success wakes only the next one
    lease = one.claim(1)
    assert lease.offsets == [2]
    one.nack(lease.lease_id, 2, delay=1)  # the second failure of the key
    assert one.claim(9).offsets == []
    clock.move(1)
    lease = one.claim(9)
    assert lease.offsets[0] == 2
    if lease.offsets == [2]:
        assert one.claim(9).offsets == []
        one.ack_lease(lease.lease_id)
        lease = one.claim(9)
        assert lease.offsets == [4]
    one.ack_lease(lease.lease_id)
    assert one.claim(9).reason == "empty"


@pytest.mark.req("K5")
def test_k5_a_worker_never_consumes_its_own_locks(make: Make, c: custody.Custody, one: Session, two: Session) -> None:
    """There is no topic of locks: a failure publishes nothing, and there is nothing for a worker to read about it."""
    make("KaKb")
    lease = one.claim(4)
    one.settle(lease.lease_id, {0: "nack", 1: "ack", 3: "ack"}, delay=5)
    one.commit()
    assert [topic.name for topic in c.topics()] == [TOPIC]
    assert c.topic(TOPIC).tails == (4,)
    # the worker that failed it and every other one see the same block at once
    assert one.claim(9).offsets == two.claim(9).offsets == []


@pytest.mark.req("K6")
def test_k6_nothing_about_a_block_can_be_compacted_away(
    make: Make, c: custody.Custody, db: psycopg.Connection, one: Session, clock: Clock
) -> None:
    """The block is derived from the failed message itself: hints may be gone, segments sealed, rows vacuumed."""
    make("KaKb", on_dead="hold")
    lease = one.claim(1)
    one.settle(lease.lease_id, {0: "dead"})
    lease = one.claim(9)
    assert lease.offsets == [1, 3]
    one.ack_lease(lease.lease_id)
    one.seal()
    one.commit()
    ((_, dropped, _, held_by),) = one.drop()
    one.commit()
    assert not dropped
    assert held_by == f"group {GROUP}, partition 0, offset 0"
    db.execute("DELETE FROM custody.freed")
    db.execute("DELETE FROM custody.awaited")
    db.execute("VACUUM custody.cases, custody.parked, custody.leases, custody.returned, custody.frontiers")
    clock.move(1_000_000)
    assert one.claim(9).offsets == []
    assert one.release_key("K") == 1
    assert one.claim(9).offsets == [2]
    one.commit()


@pytest.mark.req("K7")
def test_k7_a_new_worker_never_runs_a_blocked_key_from_its_first_claim_on(
    make: Make, c: custody.Custody, one: Session, session: Callable[[str], Session]
) -> None:
    """Whatever the history behind a block, the first claim of a newcomer obeys it and reads no history."""
    make("K", max_attempts=1000)
    lease = one.claim(1)
    for _ in range(100):
        one.nack(lease.lease_id, 0, delay=0)
        lease = one.claim(1)
        assert lease.offsets == [0]
    one.nack(lease.lease_id, 0, delay=60)
    one.commit()
    c.publish_many(TOPIC, [custody.Outgoing(key, key=key) for key in "aKb"])
    newcomer = session("newcomer")
    before = reads(newcomer)
    assert newcomer.claim(9).offsets == [1, 3]
    assert reads(newcomer) == before
    newcomer.commit()
    assert newcomer.claim(9).reason == "empty"


def reads(session: Session) -> tuple[int, ...]:
    """How often this session's transactions have scanned the journal."""
    row = session.connection.execute(
        "SELECT coalesce(seq_scan, 0), coalesce(idx_scan, 0) FROM pg_stat_xact_user_tables WHERE relname = 'journal'"
    ).fetchone()
    assert row is not None
    return tuple(row)
