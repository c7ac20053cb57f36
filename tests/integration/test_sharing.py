"""Threads of one client share transactions: each has its own answer, and nobody who is alone waits."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from tests.conftest import Clock
from tests.waiting import wait_for

import custody
from custody.engine.sharing import SharedCommits
from custody.errors import CustodyError, DatabaseUnavailable, LeaseLost
from custody.model.entities import Receipt, Settled

pytestmark = [pytest.mark.core, pytest.mark.req("C5")]


@pytest.fixture
def sharing(c: custody.Custody, database_url: str, clock: Clock) -> Iterator[custody.Custody]:
    """A client whose threads share, beside `c`."""
    c.create_topic("orders", partitions=2)
    c.create_group("orders", "g", custody.Policy(ordering="key"))
    with custody.connect(database_url, worker="sharing", clock=clock, share_commits=True) as opened:
        yield opened


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(24) as executor:
        yield executor


def shared(c: custody.Custody) -> SharedCommits:
    assert c._shared is not None
    return c._shared


class Held:
    """All partitions of a topic are locked by somebody else."""

    def __init__(self, url: str) -> None:
        self._connection = psycopg.connect(url)

    def __enter__(self) -> Held:
        self._connection.execute("SELECT FROM custody.heads FOR UPDATE")
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def first(self, c: custody.Custody) -> None:
        """Returns when a publish of the client waits for this lock, and so others wait for it."""
        waiting = "SELECT FROM pg_locks WHERE NOT granted AND pg_backend_pid() = ANY (pg_blocking_pids(pid))"
        wait_for(lambda: bool(self._connection.execute(waiting).fetchall()), "the first is under way")
        assert shared(c).publishes.queue.running == 1


def queued(c: custody.Custody, count: int) -> None:
    wait_for(lambda: len(shared(c).publishes.queue.pending) == count, "the others have come")


def test_publishes_that_wait_go_together_and_one_thread_keeps_its_order(
    sharing: custody.Custody, threads: ThreadPoolExecutor, database_url: str, commits: Callable[[], int]
) -> None:
    def publish(n: int) -> list[Receipt]:
        return [sharing.publish("orders", {"n": n, "m": m}, key=f"k{n}") for m in range(2)]

    with Held(database_url) as held:
        first = threads.submit(sharing.publish, "orders", "first")
        held.first(sharing)
        rest = [threads.submit(publish, n) for n in range(20)]
        queued(sharing, 20)
    receipts = [first.result(), *(receipt for one in rest for receipt in one.result())]
    assert len({(one.partition, one.offset) for one in receipts}) == 41
    found = {(m.partition, m.offset): m.payload for p in range(2) for m in sharing.read("orders", p)}
    assert [found[one.partition, one.offset] for one in receipts] == [
        "first",
        *({"n": n, "m": m} for n in range(20) for m in range(2)),
    ]
    assert all(earlier.result()[0].offset < earlier.result()[1].offset for earlier in rest)
    assert commits() < 15


def test_an_error_is_its_callers_own(sharing: custody.Custody, threads: ThreadPoolExecutor, database_url: str) -> None:
    def publish(n: int, **rest: Any) -> object:
        try:
            return sharing.publish("orders", n, **rest)
        except CustodyError as error:
            return error

    with Held(database_url) as held:
        first = threads.submit(publish, 0)
        held.first(sharing)
        wanted: list[dict[str, Any]] = [{}, {"partition": 9}, {"partition": 9}, {"headers": {"x": "\0"}}, {}]
        rest = [threads.submit(publish, n, **one) for n, one in enumerate(wanted)]
        queued(sharing, 5)
    answers = [one.result() for one in (first, *rest)]
    assert [getattr(one, "code", "") for one in answers] == [
        "",
        "",
        "partition_not_found",
        "partition_not_found",
        "invalid_payload",
        "",
    ]
    assert answers[2] is not answers[3]
    assert sharing.topic("orders").message_count == 3


def test_what_cannot_be_shared_goes_by_itself(
    sharing: custody.Custody, threads: ThreadPoolExecutor, database_url: str
) -> None:
    sharing.publish("orders", 0, partition=0)
    producer = sharing.init_producer("p")
    with Held(database_url):
        alone = [
            threads.submit(sharing.publish, "orders", 1, partition=0, expected_offset=1),
            threads.submit(sharing.publish, "orders", 2, delay="1h"),
            threads.submit(producer.publish, "orders", 3, partition=1),
        ]
        wait_for(lambda: sharing._db.connections()[0] == 3, "each has a connection of its own")
        assert shared(sharing).publishes.queue.running == 0
    assert [one.result().partition for one in alone if one is not alone[1]] == [0, 1]
    lease = sharing.claim("orders", "g", partition=0, max_messages=2)
    with psycopg.connect(database_url) as own:
        assert threads.submit(lease.ack, connection=own).result().settled == 2
        own.rollback()
    assert lease.ack() == Settled(settled=2)


def test_acks_that_wait_go_together(
    sharing: custody.Custody, threads: ThreadPoolExecutor, db: psycopg.Connection
) -> None:
    for n in range(14):
        sharing.publish("orders", n, key=f"k{n}", partition=0, allow_split=True)
    leases = [sharing.claim("orders", "g", partition=0) for _ in range(13)]
    leases[12].nack(delay="1h")

    def ack(n: int) -> object:
        try:
            return leases[n].ack() if n % 2 else leases[n].ack(leases[n].messages)
        except LeaseLost as error:
            return error.lost

    db.execute("BEGIN")
    db.execute("LOCK TABLE custody.journal IN SHARE MODE")
    first = [threads.submit(ack, n) for n in range(2)]
    wait_for(lambda: shared(sharing).acks.queue.running == 2, "two are under way")
    rest = [threads.submit(ack, n) for n in range(2, 13)]
    wait_for(lambda: len(shared(sharing).acks.queue.pending) == 11, "the others have come")
    db.execute("COMMIT")
    assert [one.result() for one in (*first, *rest)] == [Settled(settled=1)] * 12 + [(12,)]
    found = db.execute("SELECT count(DISTINCT xid), min(worker) FROM custody.journal WHERE kind = 'ack'").fetchone()
    assert found is not None
    assert found[0] <= 4
    assert found[1] == "sharing"


def test_nobody_waits_for_an_answer_when_it_is_closed(
    sharing: custody.Custody, threads: ThreadPoolExecutor, database_url: str
) -> None:
    with Held(database_url) as held:
        calls = [threads.submit(sharing.publish, "orders", 0)]
        held.first(sharing)
        calls += [threads.submit(sharing.publish, "orders", n) for n in range(5)]
        queued(sharing, 5)
        sharing.close()
    assert [type(one.exception(20)) for one in calls] == [type(None)] + [DatabaseUnavailable] * 5


def test_a_lost_connection_is_reported_to_all_of_a_batch_and_to_nobody_else(
    sharing: custody.Custody, threads: ThreadPoolExecutor, database_url: str, db: psycopg.Connection
) -> None:
    with Held(database_url) as held:
        first = threads.submit(sharing.publish, "orders", 0)
        held.first(sharing)
        rest = [threads.submit(sharing.publish, "orders", n) for n in range(1, 5)]
        queued(sharing, 4)
        db.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE wait_event_type = 'Lock' AND datname = current_database()"
        )
        assert isinstance(first.exception(20), DatabaseUnavailable)
        held.first(sharing)
    assert [one.result(20).topic for one in rest] == ["orders"] * 4


def test_ctrl_c_ends_the_call_of_the_main_thread_alone(
    sharing: custody.Custody, threads: ThreadPoolExecutor, database_url: str
) -> None:
    with Held(database_url) as held:
        calls = [threads.submit(sharing.publish, "orders", 0)]
        held.first(sharing)
        calls += [threads.submit(sharing.publish, "orders", n) for n in range(5)]
        queued(sharing, 5)

        def interrupt() -> None:
            wait_for(lambda: sharing._db.connections()[0] == 2, "the main thread is under way")
            os.kill(os.getpid(), signal.SIGINT)

        threads.submit(interrupt)
        with pytest.raises(KeyboardInterrupt):
            sharing.publish("orders", "main")
    assert len([one.result(20) for one in calls]) == 6
    assert sharing.topic("orders").message_count == 6


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_forked_child_does_not_wait_for_threads_of_its_parent(
    sharing: custody.Custody, threads: ThreadPoolExecutor, database_url: str
) -> None:
    with Held(database_url) as held:
        first = threads.submit(sharing.publish, "orders", 0)
        held.first(sharing)
        child = os.fork()
        if child == 0:
            queue = shared(sharing).publishes.queue
            os._exit(0 if queue.running == 0 and not shared(sharing).publishes._guard.locked() else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert shared(sharing).publishes.queue.running == 1
    first.result(20)


def test_a_worker_turns_it_on(c: custody.Custody) -> None:
    c.create_topic("orders")
    c.create_group("orders", "g")
    assert c._shared is None
    c.worker_for("orders", "g", print)
    assert c._shared is not None


def test_a_topic_that_is_made_anew_is_placed_anew(
    sharing: custody.Custody, threads: ThreadPoolExecutor, c: custody.Custody, database_url: str
) -> None:
    threads.submit(sharing.publish, "orders", 1, key="k").result()
    c.delete_topic("orders")
    c.create_topic("orders", partitions=7)
    with Held(database_url) as held:
        calls = [threads.submit(sharing.publish, "orders", 0, key="k")]
        held.first(sharing)
        calls += [threads.submit(sharing.publish, "orders", n, key=f"k{n}") for n in range(8)]
        queued(sharing, 8)
    assert len({(one.result().partition, one.result().offset) for one in calls}) == 9
    assert max(one.result().partition for one in calls) > 1


def test_threads_at_once_publish_and_ack_each_message_once(sharing: custody.Custody) -> None:
    sharing.create_topic("busy", partitions=3)
    sharing.create_group("busy", "g", custody.Policy(ordering="none"))
    published: list[Receipt] = []
    acked: list[tuple[int, int]] = []
    errors: list[BaseException] = []

    def work(n: int) -> None:
        try:
            published.extend(sharing.publish("busy", [n, m]) for m in range(10))
            taken = 0
            while taken < 10:
                lease = sharing.claim("busy", "g", max_messages=10 - taken)
                if lease:
                    taken += lease.ack().settled
                    acked.extend((message.partition, message.offset) for message in lease)
        except BaseException as error:
            errors.append(error)

    workers = [threading.Thread(target=work, args=[n]) for n in range(12)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert not errors
    assert sorted(acked) == sorted((one.partition, one.offset) for one in published)
    assert len(set(acked)) == 120
    assert sharing.stats("busy", "g").depth == 0
