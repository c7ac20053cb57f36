"""The HTTP connections of a client on an event loop: what `Transport` uses of urllib3's pool, by httpx.

Errors are those of urllib3, which say whether a request may have arrived.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, NamedTuple

from custody import extras
from custody.bridge import OneLoop, awaited, outside

MOST = 100
"""Most connections. Other requests wait for one, for at most as long as for their answer."""


class Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    data: bytes


class AsyncPool:
    """Pooled connections for one event loop. Used by code that `bridge` runs."""

    def __init__(self, *, maxsize: int, retries: bool, ssl_context: Any = False) -> None:
        with extras.named():
            httpx = outside(lambda: import_module("httpx"))  # which takes long
            import urllib3
        assert not retries, "the transport repeats what may be repeated"
        self._loop = OneLoop()
        self._httpx, self._errors = httpx, urllib3.exceptions
        limits = httpx.Limits(max_connections=min(maxsize, MOST), max_keepalive_connections=MOST)
        self._client = httpx.AsyncClient(verify=ssl_context, limits=limits, trust_env=False)

    def request(
        self, method: str, url: str, *, body: bytes | None, headers: dict[str, str], timeout: Any, redirect: bool
    ) -> Answer:
        self._loop.require()
        if self._client.is_closed:
            raise self._errors.HTTPError("the client is closed")
        waits = self._httpx.Timeout(timeout.read_timeout, connect=timeout.connect_timeout)
        try:
            response = awaited(
                self._client.request(
                    method, url, content=body, headers=headers, timeout=waits, follow_redirects=redirect
                )
            )
        except (self._httpx.ConnectTimeout, self._httpx.PoolTimeout) as error:
            raise self._errors.ConnectTimeoutError(str(error)) from error
        except self._httpx.ConnectError as error:
            if "CERTIFICATE" in str(error):
                raise self._errors.SSLError(str(error)) from error
            raise self._errors.ConnectTimeoutError(str(error)) from error
        except self._httpx.HTTPError as error:
            raise self._errors.HTTPError(str(error)) from error
        return Answer(response.status_code, response.headers, response.content)

    def clear(self) -> None:
        awaited(self._client.aclose())
