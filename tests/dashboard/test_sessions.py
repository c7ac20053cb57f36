"""Sessions: a token is worth nothing after the logout, or when nobody used it for long."""

from __future__ import annotations

import pytest

from custody.dashboard.sessions import IDLE, Sessions

pytestmark = pytest.mark.req("G19")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def headers(cookie: bytes) -> dict[bytes, bytes]:
    return {b"cookie": b"theme=dark; " + cookie.partition(b";")[0]}


def test_a_session_stands_for_its_key() -> None:
    clock = Clock()
    sessions = Sessions(secure=True, clock=clock)
    cookie = sessions.begin(b"cus_secret")
    assert b"cus_secret" not in cookie
    assert cookie.endswith(b"; Path=/ui; HttpOnly; SameSite=Lax; Secure")
    assert sessions.key(headers(cookie)) == b"cus_secret"
    assert sessions.key({}) is None
    assert sessions.key({b"cookie": b"custody_session=guessed"}) is None
    assert sessions.key({b"cookie": b"\xff=;;;=="}) is None
    sessions.end(headers(cookie))
    assert sessions.key(headers(cookie)) is None


def test_a_session_ends_when_nobody_uses_it() -> None:
    clock = Clock()
    sessions = Sessions(secure=False, clock=clock)
    cookie = sessions.begin(b"key")
    clock.now = IDLE
    assert sessions.key(headers(cookie)) == b"key", "used in time"
    clock.now = 2 * IDLE
    assert sessions.key(headers(cookie)) == b"key"
    clock.now = 3 * IDLE + 1
    assert sessions.key(headers(cookie)) is None


def test_the_number_of_sessions_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("custody.dashboard.sessions.MOST", 2)
    sessions = Sessions(secure=False)
    first, second, third = (sessions.begin(key) for key in (b"1", b"2", b"3"))
    assert [sessions.key(headers(one)) for one in (first, second, third)] == [None, b"2", b"3"]
