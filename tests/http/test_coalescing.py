"""Requests of independent clients share a transaction; each has its own answer."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
from tests.http.conftest import Http, Response, served
from tests.waiting import wait_for

import custody

pytestmark = pytest.mark.core


@pytest.mark.req("C5")
def test_single_publishes_that_meet_share_a_commit_and_a_bad_one_spoils_nobody(
    c: custody.Custody, http_: Http, database_url: str, commits: Callable[[], int]
) -> None:
    c.create_topic("orders")
    bodies = [{"topic": "orders", "payload": n} for n in range(20)]
    bodies[7]["partition"] = 5
    bodies[11]["headers"] = {"x-custody-routing-key": "*"}
    with psycopg.connect(database_url) as holder, ThreadPoolExecutor(21) as clients:
        holder.execute("SELECT FROM custody.heads FOR UPDATE")
        first = clients.submit(http_.post, "/messages", {"topic": "orders", "payload": "first"})
        wait_for(lambda: http_.state.publishes.queue.running == 1, "the first request is under way")
        rest = [clients.submit(http_.post, "/messages", body) for body in bodies]
        wait_for(lambda: len(http_.state.publishes.queue.pending) == 20, "the others have come")
        holder.rollback()
        assert first.result().json["offset"] == 0
        answers = [one.result() for one in rest]
    assert [answer.status for answer in answers] == [
        200 if n not in (7, 11) else {7: 404, 11: 422}[n] for n in range(20)
    ]
    assert answers[7].code == "partition_not_found"
    found = {message.offset: message.payload for message in c.read("orders")}
    assert all(found[a.json["offset"]] == n for n, a in enumerate(answers) if a.status == 200)
    # the first alone; then all others; the refused partition made those that were merged with it go one by one, but
    # still in the same transaction
    assert commits() <= 3


def test_large_publishes_that_meet_do_not_all_go_together(
    c: custody.Custody, http_: Http, database_url: str, commits: Callable[[], int]
) -> None:
    """Hundreds of them would be more than PostgreSQL takes in one call, and so would be their retries."""
    c.create_topic("orders")
    body = json.dumps({"topic": "orders", "payload": "x" * 6_000_000}).encode()
    with psycopg.connect(database_url) as holder, ThreadPoolExecutor(5) as clients:
        holder.execute("SELECT FROM custody.heads FOR UPDATE")
        first = clients.submit(http_.post, "/messages", {"topic": "orders", "payload": "first"})
        wait_for(lambda: http_.state.publishes.queue.running == 1, "the first request is under way")
        rest = [clients.submit(http_.post, "/messages", body) for _ in range(4)]
        wait_for(lambda: len(http_.state.publishes.queue.pending) == 4, "the others have come")
        holder.rollback()
        assert [one.result().status for one in (first, *rest)] == [200] * 5
    assert commits() == 3


@pytest.mark.req("C5")
def test_single_acks_that_meet_share_a_commit(c: custody.Custody, http_: Http, db: psycopg.Connection) -> None:
    c.create_topic("orders")
    c.create_group("orders", "g")
    c.publish_many("orders", list(range(12)))
    leases = [http_.get("/messages/orders/0?group=g").json for _ in range(12)]
    with ThreadPoolExecutor(12) as clients:
        db.execute("BEGIN")
        db.execute("LOCK TABLE custody.journal IN SHARE MODE")  # nobody can write to it: what is under way waits
        first = [
            clients.submit(http_.post, "/messages/ack", {"receipt": lease["messages"][0]["receipt"]})
            for lease in leases[:2]
        ]
        wait_for(lambda: http_.state.acks.queue.running == 2, "two are under way")
        rest = [
            clients.submit(http_.post, "/messages/ack", {"receipt": lease["messages"][0]["receipt"]})
            for lease in leases[2:]
        ]
        wait_for(lambda: len(http_.state.acks.queue.pending) == 10, "the others have come")
        db.execute("COMMIT")
        answers: list[Response] = [one.result() for one in (*first, *rest)]
    assert [answer.json["settled"] for answer in answers] == [1] * 12
    assert c.stats("orders", "g").in_flight == 0
    transactions = db.execute("SELECT count(DISTINCT xid) FROM custody.journal WHERE kind = 'ack'").fetchone()[0]
    assert transactions <= 4


def test_an_ack_that_waits_for_somebody_does_not_hold_up_others(
    c: custody.Custody, http_: Http, database_url: str
) -> None:
    """A lease that is being settled in a user's own open transaction is in the way of its own acks only."""
    c.create_topic("orders")
    c.create_group("orders", "g")
    c.publish_many("orders", list(range(4)))
    pair = c.claim("orders", "g", max_messages=2)
    other = c.claim("orders", "g")
    with psycopg.connect(database_url) as own:
        pair.ack(pair.messages[0], connection=own)
        held = threading.Thread(
            target=lambda: http_.post("/messages/ack", {"lease_id": str(pair.lease_id), "offsets": [1]})
        )
        held.start()
        wait_for(lambda: http_.state.acks.queue.running == 1, "the ack that waits is under way")
        assert http_.post("/messages/ack", {"lease_id": str(other.lease_id)}, timeout=10).json["settled"] == 1
        assert held.is_alive()
        own.commit()
    held.join(10)
    assert c.stats("orders", "g").in_flight == 0


@pytest.mark.parametrize("leases", [1, 2])
def test_acks_of_a_lease_that_somebody_holds_are_all_given_up_in_time(database_url: str, leases: int) -> None:
    with (
        custody.connect(database_url, statement_timeout="500ms") as c,
        served(c) as http,
        psycopg.connect(database_url) as own,
        ThreadPoolExecutor(8) as clients,
    ):
        c.create_topic("orders")
        c.create_group("orders", "g")
        c.publish_many("orders", list(range(4 * leases)))
        asked = []
        for _ in range(leases):
            lease = c.claim("orders", "g", max_messages=4)
            lease.ack(lease.messages[0], connection=own)
            for message in lease.messages[1:]:
                body = {"lease_id": str(lease.lease_id), "offsets": [message.offset]}
                asked.append(clients.submit(http.post, "/messages/ack", body, timeout=15))
        try:
            answers = [one.result() for one in asked]
        finally:
            own.rollback()
        assert {(answer.status, answer.code) for answer in answers} == {(503, "busy")}
