"""How much one answer contains: it ends with the message that reaches the bound, and nothing is lost by that."""

from __future__ import annotations

import random
from collections import defaultdict
from typing import Any

import psycopg
import pytest
from tests.http.conftest import Http

import custody
from custody.coalesced import Claim
from custody.engine import server_verbs
from custody.remote import publishing

pytestmark = pytest.mark.core

LARGE = "x" * 398  # with its quotes 400 bytes: the third one reaches the bound


@pytest.fixture(autouse=True)
def bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_verbs, "LARGEST_ANSWER", 1000)


def offsets(answer: Any) -> list[int]:
    return [message["offset"] for message in answer]


@pytest.mark.req("G19")
def test_a_list_of_messages_ends_early(c: custody.Custody, http_: Http) -> None:
    c.create_topic("orders")
    c.create_group("orders", "bare", bare=True)
    c.create_group("orders", "g", custody.Policy(max_attempts=1, breaker=None))
    for payload in (*[LARGE] * 5, LARGE * 5, 6, 7):
        c.publish("orders", payload)
    c.claim("orders", "g", max_messages=8).nack()
    read = "/topics/orders/partitions/0/messages?max=8"
    assert offsets(http_.get(read).json) == [0, 1, 2]
    assert offsets(http_.get(f"{read}&offset=3").json) == [3, 4, 5]
    assert offsets(http_.get(f"{read}&offset=5").json) == [5], "one that is too large is alone"
    assert offsets(http_.get(f"{read}&offset=6").json) == [6, 7]
    group = "/topics/orders/groups"
    assert offsets(http_.get(f"{group}/bare/fetch?max=8").json) == [0, 1, 2]
    http_.post(f"{group}/bare/commit", {"partition": 0, "next_offset": 3})
    assert offsets(http_.get(f"{group}/bare/fetch?max=8").json) == [3, 4, 5]
    dead = http_.get(f"{group}/g/dead?limit=8").json
    assert offsets(dead) == [0, 1, 2]
    assert len(c.dead("orders", "g")) == 8, "for a server alone"
    for number in range(5):
        c.publish("orders", LARGE, delay=60 + number)
    assert len(http_.get("/topics/orders/delayed?limit=5").json) == 3


@pytest.mark.req("G19")
def test_a_receive_ends_early_and_gives_the_rest_back_untouched(c: custody.Custody, http_: Http) -> None:
    c.create_topic("orders")
    c.create_group("orders", "g")
    for _ in range(8):
        c.publish("orders", LARGE)
    received = [http_.get("/messages/orders?group=g&max=8").json for _ in range(3)]
    assert [offsets(one["messages"]) for one in received] == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert {message["attempt"] for one in received for message in one["messages"]} == {1}
    http_.post("/messages/nack", {"lease_id": received[0]["lease_id"], "delay": "0s"})
    for one in received[1:]:
        assert http_.post("/messages/ack", {"lease_id": one["lease_id"]}).status == 200
    for _ in range(3):
        c.publish("orders", LARGE)
    again = [http_.get("/messages/orders?group=g&max=8").json["messages"] for _ in range(2)]
    assert sorted(offsets(again[0] + again[1])) == [0, 1, 2, 8, 9, 10]
    assert {message["offset"]: message["attempt"] for message in again[0] + again[1]} == {
        **dict.fromkeys([0, 1, 2], 2),
        **dict.fromkeys([8, 9, 10], 1),
    }
    assert c.stats("orders", "g").in_flight == 6


@pytest.mark.req("G19")
def test_an_ack_with_the_next_receive_is_of_what_was_sent(c: custody.Custody, http_: Http) -> None:
    c.create_topic("orders")
    c.create_group("orders", "g")
    for _ in range(8):
        c.publish("orders", LARGE)
    answer, settled, sent = http_.get("/messages/orders?group=g&max=8").json, [], []
    while answer["messages"]:
        sent += offsets(answer["messages"])
        answer = http_.get(f"/messages/orders?group=g&max=8&ack={answer['lease_id']}").json
        settled.append(answer["settled"]["settled"])
    assert (sent, settled) == ([*range(8)], [3, 3, 2])
    assert c.stats("orders", "g").depth == 0


@pytest.mark.req("G19")
@pytest.mark.parametrize("ordering", ["none", "key"])
def test_every_message_comes_and_keys_keep_their_order(c: custody.Custody, http_: Http, ordering: Any) -> None:
    dice = random.Random(5)
    c.create_topic("orders")
    policy = custody.Policy(ordering=ordering, max_attempts=100, breaker=None, backoff=custody.Constant("0s"))
    c.create_group("orders", "g", policy)
    for _ in range(60):
        c.publish("orders", "x" * dice.randrange(700), key=dice.choice("abc"))
    done: dict[str, list[int]] = defaultdict(list)
    held: list[Any] = []
    for _ in range(400):
        lease = http_.get(f"/messages/orders?group=g&max={dice.randint(1, 20)}").json
        assert sum(len(message["payload"]) + 2 for message in lease["messages"][:-1]) < 1000
        if lease["messages"]:
            held.append(lease)
        if not held:
            break
        if lease["messages"] and len(held) < 3:
            continue
        lease = held.pop(dice.randrange(len(held)))
        place = {"lease_id": lease["lease_id"]}
        if dice.random() < 0.3:
            assert http_.post("/messages/nack", {**place, "offset": lease["messages"][0]["offset"]}).status == 200
            http_.post("/messages/release", place)  # the rest of it, if there is any
            continue
        assert http_.post("/messages/ack", place).status == 200
        for message in lease["messages"]:
            done[message["key"]].append(message["offset"])
    assert sorted(offset for some in done.values() for offset in some) == list(range(60))
    if ordering == "key":
        assert all(some == sorted(some) for some in done.values())
    assert c.stats("orders", "g").depth == 0


@pytest.mark.req("G19")
def test_those_who_wait_together_share_the_bound(c: custody.Custody, http_: Http) -> None:
    c.create_topic("orders")
    c.create_group("orders", "g")
    for _ in range(20):
        c.publish("orders", LARGE)
    assert http_.state is not None
    callers = [Claim(max_messages=2, worker=f"w{number}") for number in range(8)]
    first = http_.state.verbs.claim_each("orders", "g", None, callers)
    assert [[message.offset for message in lease.messages] for lease in first] == [[0, 1], [2]]
    cut = http_.state.verbs.claim_each("orders", "g", None, [Claim(max_messages=8, worker="w")])
    assert [message.offset for message in cut[0].messages] == [3, 4, 5]
    with psycopg.connect(c.database_url) as connection:
        sizes = connection.execute("SELECT size FROM custody.leases WHERE lease_id = %s", [cut[0].lease_id]).fetchall()
    assert sizes == [(3,)], "what was given back does not count as delivered with them"


@pytest.mark.req("G19")
def test_a_client_reads_on_behind_a_large_answer(
    c: custody.Custody, http_: Http, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing, "MAY_BE_CUT", 1000)
    c.create_topic("orders")
    for _ in range(8):
        c.publish("orders", LARGE)
    with custody.connect(http_.url) as remote:
        assert [message.offset for message in remote.read("orders", max_messages=100)] == list(range(8))
        assert [message.offset for message in remote.read("orders", max_messages=5)] == list(range(5))
