"""HTTP connections on which all that happens, from connecting to the last byte of the answer, ends by one deadline.

The time-out of a socket is for each operation: a server that sends a byte now and then could hold a thread for ever.
"""

from __future__ import annotations

import http.client
import io
import socket
import ssl
import time
from email.utils import parsedate_to_datetime
from typing import Any

from custody.relay.addresses import Networks, permitted


def connected(
    host: str, seconds: float, context: ssl.SSLContext | None = None, networks: Networks | None = None
) -> http.client.HTTPConnection:
    """A connection to `host` (and its port), with TLS if there is a context. Raises OSError if it fails, and
    `Forbidden` if `networks` permit none of its addresses."""
    until = time.monotonic() + seconds
    made: Any = http.client.HTTPSConnection(host, context=context) if context else http.client.HTTPConnection(host)
    opened = _opened(made.host, made.port, until, networks)
    try:
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if context is not None:
            opened.settimeout(_left(until))
            opened = context.wrap_socket(opened, server_hostname=made.host)
    except BaseException:
        opened.close()
        raise
    made.sock = _Timed(opened, until)
    connection: http.client.HTTPConnection = made
    return connection


def retry_after(headers: http.client.HTTPMessage, now: float, most: float) -> float | None:
    """For how many seconds, `most` at most, an answer asks to be left alone: it names them, or a date."""
    given = headers.get("retry-after", "").strip()
    try:
        wait = float(given) if given.isdecimal() else parsedate_to_datetime(given).timestamp() - now
    except (ValueError, OverflowError):  # it is neither, or there is none
        return None
    return min(max(wait, 0.0), most)


def _opened(host: str, port: int, until: float, networks: Networks | None) -> socket.socket:
    """By the first address that answers; each has its share of the time. What was judged is what is connected to."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    if networks is not None:
        found = permitted(found, host, networks)
    failure: OSError | None = None
    for place, (family, kind, protocol, _, address) in enumerate(found):
        opened = socket.socket(family, kind, protocol)
        try:
            opened.settimeout(_left(until) / (len(found) - place))
            opened.connect(address)
        except OSError as error:
            opened.close()
            failure = error
        except BaseException:
            opened.close()
            raise
        else:
            return opened
    raise failure or OSError(f"{host} has no address")


def _left(until: float) -> float:
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    return left


class _Timed:
    """As much of a socket as http.client uses."""

    def __init__(self, opened: socket.socket, until: float) -> None:
        self._socket, self._until = opened, until
        self._answer: _Reader | None = None

    def sendall(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            self._socket.settimeout(_left(self._until))
            rest = rest[self._socket.send(rest) :]

    def makefile(self, _mode: str) -> io.BufferedReader:
        self._answer = _Reader(self._socket, self._until)
        return io.BufferedReader(self._answer)

    def close(self) -> None:
        if self._answer is None:  # else it is closed with the answer, which may still be read
            self._socket.close()


class _Reader(io.RawIOBase):
    def __init__(self, opened: socket.socket, until: float) -> None:
        self._socket, self._until = opened, until

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._socket.settimeout(_left(self._until))
        return self._socket.recv_into(buffer)

    def close(self) -> None:
        super().close()
        self._socket.close()
