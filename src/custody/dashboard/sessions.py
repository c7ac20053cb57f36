"""Sessions of browsers: a cookie with a random token stands for an API key, which the browser does not keep."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable, Mapping
from http.cookies import CookieError, SimpleCookie

COOKIE = "custody_session"
IDLE = 12 * 3600.0
"""Seconds after which an unused session ends."""
MOST = 10_000
"""Most sessions of a server; the oldest one ends first."""


class Sessions:
    """The sessions of one server process, in memory: a restart ends them. Used in its event loop.

    A session holds the key itself, so that a revoked key ends with its next request.
    """

    def __init__(self, *, secure: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._secure, self._clock = secure, clock
        self._sessions: dict[bytes, tuple[bytes, float]] = {}

    def begin(self, key: bytes) -> bytes:
        """Starts a session with this key; returns the value of its Set-Cookie header."""
        token = secrets.token_urlsafe(32)
        while len(self._sessions) >= MOST:
            del self._sessions[next(iter(self._sessions))]
        self._sessions[_digest(token)] = key, self._clock()
        return self._cookie(token)

    def end(self, headers: Mapping[bytes, bytes]) -> bytes:
        """Ends the session of a request; returns the value of the Set-Cookie header that removes its cookie."""
        token = _token(headers)
        if token is not None:
            self._sessions.pop(_digest(token), None)
        return self._cookie("") + b"; Max-Age=0"

    def key(self, headers: Mapping[bytes, bytes]) -> bytes | None:
        """The key of a request's session; None without a session."""
        token = _token(headers)
        digest = None if token is None else _digest(token)
        if digest is None or digest not in self._sessions:
            return None
        key, used = self._sessions.pop(digest)
        if self._clock() - used > IDLE:
            return None
        self._sessions[digest] = key, self._clock()  # last in the order
        return key

    def _cookie(self, token: str) -> bytes:
        secure = "; Secure" if self._secure else ""
        return f"{COOKIE}={token}; Path=/ui; HttpOnly; SameSite=Lax{secure}".encode()


def _token(headers: Mapping[bytes, bytes]) -> str | None:
    cookies: SimpleCookie = SimpleCookie()
    try:
        cookies.load(headers.get(b"cookie", b"").decode("latin-1"))
    except CookieError:
        return None
    found = cookies.get(COOKIE)
    return None if found is None or not found.value else found.value


def _digest(token: str) -> bytes:
    # looked up by a digest, so that the time of a lookup says nothing about the tokens
    return hashlib.sha256(token.encode()).digest()
