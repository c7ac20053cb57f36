"""A stop loses nothing: what was accepted is answered, and whoever waits is told at once."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable
from contextlib import closing
from urllib.parse import urlsplit

import pytest
from tests.http.conftest import Http, Process, Response, served
from tests.waiting import wait_for

import custody

pytestmark = pytest.mark.core


def test_a_stop_ends_waiting_polls_with_an_empty_answer(c: custody.Custody, process: Callable[..., Process]) -> None:
    c.create_topic("orders")
    server = process()
    answers: list[Response] = []
    polls = [
        threading.Thread(target=lambda: answers.append(server.http.get("/messages/orders?wait=50s"))) for _ in range(5)
    ]
    for poll in polls:
        poll.start()
    wait_for(lambda: any(group.name == "default" for group in c.groups("orders")), "the first poll has come")
    assert server.stop(timeout=10) == 0
    for poll in polls:
        poll.join(5)
    assert [(answer.status, answer.json["messages"]) for answer in answers] == [(200, [])] * 5


def test_a_stop_under_load_answers_all_that_it_has_accepted(
    c: custody.Custody, process: Callable[..., Process]
) -> None:
    """Whoever got no answer was not heard: nothing happens that nobody is told of."""
    c.create_topic("orders", partitions=2)
    server = process()
    told: set[str] = set()
    untold: set[str] = set()
    enough = threading.Event()

    def publish(client: int) -> None:
        with closing(http.client.HTTPConnection(urlsplit(server.http.url).netloc, timeout=20)) as connection:
            for number in range(100_000):
                payload = f"{client}/{number}"
                try:
                    connection.request("POST", "/messages", json.dumps({"topic": "orders", "payload": payload}))
                    response = connection.getresponse()
                    response.read()
                except (OSError, http.client.HTTPException):
                    untold.add(payload)
                    return
                assert response.status == 200
                told.add(payload)
                if len(told) > 300:
                    enough.set()

    clients = [threading.Thread(target=publish, args=[client]) for client in range(16)]
    for client in clients:
        client.start()
    assert enough.wait(30)
    assert server.stop(timeout=20) == 0
    for client in clients:
        client.join(20)
    log = {message.payload for partition in range(2) for message in c.read("orders", partition, max_messages=10_000)}
    assert log == told
    assert len(untold) == 16


def test_a_lease_for_one_who_was_told_to_go_is_given_back(c: custody.Custody, serve: Callable[..., Http]) -> None:
    """The stop comes while the claim is under way that would have served the one who waits."""
    c.create_topic("orders")
    c.create_group("orders", "g")
    under_way, go_on = threading.Event(), threading.Event()
    with served(c) as http:
        real = http.state.verbs.claim_each
        poll = threading.Thread(target=lambda: http.get("/messages/orders?group=g&wait=50s&visibility_timeout=10m"))
        poll.start()
        lines = http.state.long_polls._lines
        wait_for(
            lambda: any(waiter.seen is not None for line in [*lines.values()] for waiter in line.waiters),
            "it waits in vain",
        )

        def slow(*arguments: object) -> object:
            under_way.set()
            assert go_on.wait(10)
            return real(*arguments)

        http.state.verbs.claim_each = slow
        c.publish("orders", 1)
        assert under_way.wait(10)
        threading.Timer(0.5, go_on.set).start()
    poll.join(10)
    assert c.stats("orders", "g").in_flight == 0
    assert c.claim("orders", "g").messages[0].attempt == 1
