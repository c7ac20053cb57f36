"""The status is read once for all who look, and at intervals for an hour after that."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.http.conftest import Http
from tests.waiting import wait_for

import custody

pytestmark = pytest.mark.req("N6")


def test_many_who_look_cost_one_call(c: custody.Custody, http_: Http, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[None] = []
    status = c.status
    monkeypatch.setattr(c, "status", lambda: (calls.append(None), status())[1])
    monkeypatch.setattr("custody.dashboard.watch.FRESH", 60.0)
    with ThreadPoolExecutor(8) as pool:
        assert {answer.status for answer in pool.map(lambda _: http_.get("/ui"), range(24))} == {200}
    assert len(calls) == 1


def test_the_line_goes_on_while_nobody_looks(
    c: custody.Custody, serve: Callable[..., Http], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[None] = []
    status = c.status
    monkeypatch.setattr(c, "status", lambda: (calls.append(None), status())[1])
    for name in ("FRESH", "STEP"):
        monkeypatch.setattr(f"custody.dashboard.watch.{name}", 0.02)
    c.create_topic("orders")
    c.create_group("orders", "billing")
    http = serve()
    assert calls == [], "a server that nobody watches reads nothing"
    assert b"<polyline" not in http.get("/ui").body
    wait_for(lambda: len(calls) > 4, "it goes on reading")
    c.publish("orders", 1)
    seen = len(calls)
    wait_for(lambda: len(calls) > seen + 2, "it goes on reading")
    assert b"from 0 to 1, at most 1" in http.get("/ui").body
