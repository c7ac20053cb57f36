"""What one key binds its groups to costs the claims of these groups, and not the publishes of another key."""

from __future__ import annotations

import itertools
import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException
from typing import Any
from urllib.parse import urlsplit

import pytest
from tests.http.conftest import Http, Process
from tests.waiting import wait_for

import custody

pytestmark = [pytest.mark.core, pytest.mark.req("V11")]

SHARED, OTHER = "shared", "other"
BOUND = 2.0
"""Seconds for the slowest publish of the other key. While claims could take every thread of the server, it waited for
60 claims of at least half a second each, seven at a time."""


class Client:
    """One key on one connection."""

    def __init__(self, url: str, key: str) -> None:
        self.connection = HTTPConnection(urlsplit(url).netloc, timeout=60)
        self.headers = {"Authorization": f"Bearer {key}"}

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()

    def __call__(self, method: str, path: str, body: object = None) -> tuple[int, Any]:
        self.connection.request(method, path, None if body is None else json.dumps(body), self.headers)
        answer = self.connection.getresponse()
        return answer.status, json.loads(answer.read())

    def publish(self, topic: str, *messages: dict[str, Any]) -> None:
        status, answer = self("POST", "/messages", {"topic": topic, "messages": messages})
        assert status == 200, answer


def most_expensive(dice: random.Random) -> list[str]:
    """As many segments as a group may have, most of them wild, and all patterns alike up to their end."""
    return ["".join(dice.choice(["a.", "b.", "*.", "*.", "*."]) for _ in range(30)) + "c" for _ in range(32)]


def nearly_matching(dice: random.Random, count: int) -> list[dict[str, Any]]:
    """Messages that no pattern matches, which is known at the end of their routing keys."""
    keys = ["".join(dice.choice("ab") + "." for _ in range(30)) + "d" for _ in range(count)]
    return [{"payload": None, "headers": {"x-custody-routing-key": key}} for key in keys]


def slowest(client: Client, seconds: float) -> float:
    """How long the slowest publish takes, of many to both topics, one after the other."""
    end, took = time.monotonic() + seconds, 0.0
    for topic in itertools.cycle([SHARED, OTHER]):
        began = time.monotonic()
        if began > end:
            break
        client.publish(topic, {"payload": 1})
        took = max(took, time.monotonic() - began)
    return took


@contextmanager
def claiming(server: Process, key: str, groups: int) -> Iterator[list[float]]:
    """Claims without a pause, a thread for each group, until the end of the server. Yields how long those took that
    looked at unbound messages."""
    took: list[float] = []
    stopped = threading.Event()

    def claim(group: int) -> None:
        with Client(server.http.url, key) as client:
            while not stopped.is_set():
                began = time.monotonic()
                try:
                    status, answer = client("GET", f"/messages/{SHARED}?group=g{group}&max=10")
                except (OSError, HTTPException):
                    assert stopped.is_set()  # the server has ended before its answer
                    return
                assert status == 200, answer
                if answer["reason"] == "busy" and answer["detail"]:
                    took.append(time.monotonic() - began)

    threads = [threading.Thread(target=claim, args=[group]) for group in range(groups)]
    for thread in threads:
        thread.start()
    try:
        yield took
    finally:
        stopped.set()
        server.kill()  # most of them still wait for their turn
        for thread in threads:
            thread.join(30)


@pytest.mark.parametrize(
    ("groups", "messages", "seconds"),
    [(60, 6_000, 1.5), pytest.param(200, 50_000, 30.0, marks=pytest.mark.long)],
)
def test_the_bindings_of_one_key_do_not_delay_the_publishes_of_another(
    c: custody.Custody, process: Callable[..., Process], groups: int, messages: int, seconds: float
) -> None:
    dice = random.Random(1)
    c.create_topic(SHARED)
    c.create_topic(OTHER)
    greedy, other = c.create_api_key("greedy", admin=[SHARED]).secret, c.create_api_key("b", produce=["*"]).secret
    server = process()
    with Client(server.http.url, greedy) as client, Client(server.http.url, other) as victim:
        bindings = most_expensive(dice)
        for group in range(groups):
            status, answer = client("POST", f"/topics/{SHARED}/groups", {"name": f"g{group}", "bindings": bindings})
            assert status == 201, answer
        for _ in range(messages // 1_000):
            client.publish(SHARED, *nearly_matching(dice, 1_000))
        unloaded = slowest(victim, 0.5)
        with claiming(server, greedy, groups) as took:
            wait_for(lambda: len(took) > 0, "the first claims are over: all the others are waiting")
            loaded = slowest(victim, seconds)
    assert max(took) > 0.25, "the claims cost too little to delay anybody"
    assert loaded < BOUND + unloaded, f"unloaded {unloaded:.3f} s, beside {groups} groups {loaded:.3f} s"


@pytest.mark.parametrize(
    ("bindings", "said"),
    [
        (["a." * 32 + "b"], "is not a pattern"),
        (["a" * 1001], "is not a pattern"),
        ([f"{n}" + ".*" * 31 for n in range(32)], "at most 1,000 segments and 10,000 characters together"),
        ([f"{n}" + "a" * 990 for n in range(11)], "at most 1,000 segments and 10,000 characters together"),
        ([f"a{n}" for n in range(101)], "at most 100 bindings"),
        ([{"headers": {f"h{n}": "1" for n in range(21)}}], "21 header conditions: at most 20"),
        ([{"headers": {"h": f"{n}"}} for n in range(21)], "at most 20 different header conditions"),
        ([{"headers": {f"{n}-{m}": "v" * 500 for m in range(20)}} for n in range(6)], "at most 50,000 characters"),
    ],
)
def test_more_expensive_bindings_are_refused(http_: Http, bindings: list[Any], said: str) -> None:
    assert http_.post("/topics", {"name": SHARED}).status == 201
    assert http_.post(f"/topics/{SHARED}/groups", {"name": "g", "bindings": ["a.>"]}).status == 201
    for refused in (
        http_.post(f"/topics/{SHARED}/groups", {"name": "new", "bindings": bindings}),
        http_("PATCH", f"/topics/{SHARED}/groups/g", {"bindings": bindings}),
    ):
        assert (refused.status, refused.code) == (422, "invalid_argument"), refused.body
        assert said in refused.json["error"]["message"], refused.body
        assert refused.json["error"]["remedy"]
    assert [group["name"] for group in http_.get(f"/topics/{SHARED}/groups").json] == ["g"]
    assert [kept["pattern"] for kept in http_.get(f"/topics/{SHARED}/groups/g").json["bindings"]] == ["a.>"]
