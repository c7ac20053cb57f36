"""Requests to a server: pooled connections, answers decoded into values, errors into ours, and safe retries.

A request that did not arrive is always retried. A request that may have arrived is retried only if the caller says that
it may be repeated. Both end after `retry_for`. An attempt of a repeatable call has a shorter timeout, so that a server
that hangs leaves time to try another one.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar
from urllib.parse import urlencode

import msgspec

from custody import bridge, extras, tracing
from custody.address import Address
from custody.errors import (
    CustodyError,
    DatabaseUnavailable,
    InvalidArgument,
    InvalidConfig,
    LeaseLost,
    ServerStopping,
    by_code,
)
from custody.forking import reset_after_fork
from custody.model.limits import NAME_LENGTH
from custody.remote.async_pool import AsyncPool
from custody.wire import fields
from custody.wire.answers import ErrorOut
from custody.wire.requests import Shape

T = TypeVar("T")
Method = Literal["GET", "POST", "PATCH", "DELETE"]

KEPT = 1_000
"""Most connections in the pool, for as many concurrent threads: a new connection for each call costs more."""
CONNECT = 5.0
"""Timeout of connecting, in seconds."""
ATTEMPT = 10.0
"""Timeout of the first attempt of a repeatable call, in seconds; doubles each time."""
ANSWER = 45.0
"""Timeout of the last attempt, or of the only one: longer than a server allows for a call of its database (30 s)."""
FIRST_PAUSE = 0.05
"""Pause after the first attempt, in seconds; doubles up to LONGEST_PAUSE."""
LONGEST_PAUSE = 2.0

_ERRORS = by_code()
_NO_REFUSAL = {408, 499}
"""Statuses below 500 by which a proxy gives up waiting: the server may have got the request."""
_NOT_PASSED_ON = {404, 421, 425, 429}
"""Statuses of a proxy that has no server at the moment, or too many requests: this one did not arrive."""
_NOT_SAID = re.compile(r"[^\x21-\x7e]")


class Tries:
    """The result of the attempts of one call. `unknown`: an attempt without an answer may have taken effect.

    `pause`: seconds to wait before the next attempt, as the last answer asks.
    """

    def __init__(self) -> None:
        self.unknown = False
        self.pause = 0.0


class Transport:
    """Requests to one server. Safe for use by many threads, or by the tasks of one event loop."""

    def __init__(
        self,
        address: Address,
        *,
        ca: str | Path | None,
        retry_for: float,
        pool_size: int,
        pool: Callable[..., Any] | None = None,
    ) -> None:
        """`pool` replaces urllib3's `PoolManager`, and gets the same options."""
        with extras.named():
            import urllib3
        self.address, self.retry_for = address, retry_for
        self._http = urllib3
        self._closed = bridge.event()
        self._options: dict[str, Any] = {"maxsize": max(pool_size, KEPT), "retries": False}
        if address.secure:
            self._options["ssl_context"] = bridge.outside(lambda: _trusting(ca))
        self._make_pool = pool or (AsyncPool if bridge.bridged() else urllib3.PoolManager)
        self._pool = self._make_pool(**self._options)
        reset_after_fork(self)

    def forked(self) -> None:
        """Replaces the connections: two processes that share one would read each other's answers."""
        closed = self._closed.is_set()
        self._closed = bridge.event()
        if closed:
            self._closed.set()
        self._pool = self._make_pool(**self._options)

    def close(self) -> None:
        self._closed.set()
        self._pool.clear()

    def call(
        self,
        method: Method,
        path: str,
        answer: type[T],
        *,
        worker: str,
        query: Shape | None = None,
        body: Shape | None = None,
        repeat: bool | None = None,
        retry_for: float | None = None,
        timeout: float | None = None,
        tries: Tries | None = None,
    ) -> T:
        """Calls an operation. `repeat`: it may be repeated although it may have taken effect; default for a GET.

        `timeout`: replaces the timeout of each attempt.
        """
        tries = tries or Tries()
        repeat = method == "GET" if repeat is None else repeat
        until = time.monotonic() + (self.retry_for if retry_for is None else retry_for)
        asked = self._url(path, query)
        sent = None if body is None else msgspec.json.encode(body, enc_hook=fields.write)
        pause, patience = FIRST_PAUSE, ATTEMPT
        while True:
            began = time.monotonic()
            wait = timeout or (patience if repeat and began + patience < until else ANSWER)
            try:
                return self._once(method, asked, sent, answer, worker, wait, tries)
            except (DatabaseUnavailable, ServerStopping) as error:
                now = time.monotonic()
                over = now + max(pause, tries.pause) > until or self._closed.is_set()
                if over or (tries.unknown and not repeat):
                    _give_up(error, tries)
            if now - began >= wait:
                patience = min(patience * 2, ANSWER)
            self._closed.wait(max(pause * random.uniform(0.5, 1), tries.pause))
            pause = min(pause * 2, LONGEST_PAUSE)

    def _url(self, path: str, query: Shape | None) -> str:
        given = {} if query is None else msgspec.to_builtins(query, enc_hook=fields.write)
        given = {name: value if value != [] else "" for name, value in given.items()}
        return self.address.url + path + (f"?{urlencode(given, doseq=True)}" if given else "")

    def _once(
        self, method: str, url: str, body: bytes | None, answer: type[T], worker: str, wait: float, tries: Tries
    ) -> T:
        errors = self._http.exceptions
        tries.pause = 0.0
        try:
            response = self._pool.request(
                method,
                url,
                body=body,
                headers=self._headers(worker),
                timeout=self._http.Timeout(connect=CONNECT, read=wait),
                redirect=False,
            )
        except (errors.NewConnectionError, errors.ConnectTimeoutError) as error:
            raise self._unreachable(error) from error
        except errors.SSLError as error:
            if "CERTIFICATE" in str(error):
                raise InvalidConfig(
                    f"the certificate of {self.address.url} is not trusted: {error}",
                    "Give the file of its authority: ca=…, or CUSTODY_CA.",
                ) from error
            tries.unknown = True
            raise self._unreachable(error) from error
        except errors.HTTPError as error:
            tries.unknown = True
            raise self._unreachable(error) from error
        if not 200 <= response.status < 300:
            pause = self._asked_for(response.headers)
            refusal = self._refusal(method, response.status, response.data, tries, pause)
            refusal.status, refusal.retry_after = response.status, pause or None
            raise refusal
        return self._read(method, response.data, answer, tries)

    def _headers(self, worker: str) -> dict[str, str]:
        headers = {
            "Content-Type": "application/json",
            "X-Custody-Worker": _NOT_SAID.sub("_", worker)[:NAME_LENGTH] or "-",
        }
        if self.address.key is not None:
            headers["Authorization"] = f"Bearer {self.address.key}"
        return {**headers, **tracing.carrier()}

    def _read(self, method: str, data: bytes, answer: type[T], tries: Tries) -> T:
        try:
            if answer is type(None):
                if data:
                    msgspec.json.decode(data)
                return None
            return msgspec.json.decode(data, type=answer, strict=False)
        except msgspec.MsgspecError as error:
            said = f"{self.address.url} sent an answer that this version does not understand: {error}"
            remedy = "Check that it is a Custody server of the same version."
            if method == "GET" and isinstance(
                error, msgspec.ValidationError
            ):  # JSON of a server: a retry would get the same
                raise CustodyError(said, remedy) from error
            raise self._open(method, said, tries, remedy) from error

    def _asked_for(self, headers: Mapping[str, str]) -> float:
        """The pause that an answer asks for (`Retry-After`), in seconds."""
        try:
            return float(self._http.Retry().parse_retry_after(headers.get("Retry-After", "0")))
        except self._http.exceptions.InvalidHeader:
            return 0.0

    def _refusal(self, method: str, status: int, data: bytes, tries: Tries, pause: float) -> CustodyError:
        """The error in an answer, as the verb itself would raise it.

        Only known refusals count as such: after any other answer the call may have taken effect.
        """
        said = f"{self.address.url} answered {status}"
        try:
            problem = msgspec.json.decode(data, type=ErrorOut).error
        except msgspec.MsgspecError:  # not from the server: from a proxy
            who = "Check that it is the address of a Custody server."
            if status in _NOT_PASSED_ON:
                tries.pause = pause
                return DatabaseUnavailable(said, who)
            if status >= 500 or status in _NO_REFUSAL:
                return self._open(method, said, tries)
            return CustodyError(said, who)
        kind, remedy = _ERRORS.get(problem.code, CustodyError), problem.remedy or ""
        if kind is CustodyError and status >= 500:
            return self._open(method, f"{said} ({problem.code}): {problem.message}", tries, remedy)
        if issubclass(kind, DatabaseUnavailable):
            tries.unknown = True
        if issubclass(kind, LeaseLost):
            return kind(problem.message, remedy, lost=problem.lost or ())
        if issubclass(kind, InvalidArgument) and problem.path:
            field = problem.path.removeprefix("$.")
            named = problem.message if field in problem.message else f"{field}: {problem.message}"
            return kind(named, remedy, path=problem.path)
        return kind(problem.message, remedy)

    def _open(self, method: str, said: str, tries: Tries, remedy: str = "") -> DatabaseUnavailable:
        """The error for an answer that does not tell whether the call took effect."""
        if method == "GET":
            return DatabaseUnavailable(said, remedy)
        tries.unknown = True
        return DatabaseUnavailable(f"{said.rstrip('.')}. Whether the call took effect is unknown", remedy)

    def _unreachable(self, error: Exception) -> DatabaseUnavailable:
        return DatabaseUnavailable(
            f"the server at {self.address.url} cannot be reached: {type(error).__name__}",
            "Check that it runs, and try again.",
        )


def _give_up(error: CustodyError, tries: Tries) -> NoReturn:
    """Raises the error of the last attempt. If any attempt may have taken effect, it says that this is unknown."""
    if tries.unknown and "unknown" not in error.message:
        unknown = DatabaseUnavailable(
            f"{error.message.rstrip('.')}. Whether the call took effect is unknown", error.remedy
        )
        unknown.status, unknown.retry_after = error.status, error.retry_after
        raise unknown from error
    raise error


def _trusting(ca: str | Path | None) -> Any:
    import ssl

    try:
        return ssl.create_default_context(cafile=None if ca is None else str(ca))
    except (OSError, ssl.SSLError) as error:
        raise InvalidConfig(f"{ca} is not a file of certificates: {error}", "Give a PEM file.") from error
