"""A stop loses nothing: what was accepted is answered, and whoever waits is told at once."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from tests.http.conftest import Process, Response
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
