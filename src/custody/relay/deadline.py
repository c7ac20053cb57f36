"""HTTP connections with one deadline for everything, from connecting to the last byte of the answer.

The timeout of a socket is for each operation: a server that sends a byte now and then could block a thread for ever.
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


def open_connection(
    host: str, seconds: float, context: ssl.SSLContext | None = None, networks: Networks | None = None
) -> http.client.HTTPConnection:
    """Connects to `host` (`name:port`), with TLS if there is a context. Raises OSError if it fails, and
    `AddressForbidden` if `networks` permits none of its addresses."""
    deadline = time.monotonic() + seconds
    made: Any = http.client.HTTPSConnection(host, context=context) if context else http.client.HTTPConnection(host)
    opened = open_socket(made.host, made.port, deadline, networks)
    try:
        if context is not None:
            opened.settimeout(_left(deadline))
            opened = context.wrap_socket(opened, server_hostname=made.host)
    except BaseException:
        opened.close()
        raise
    made.sock = DeadlineSocket(opened, deadline)
    connection: http.client.HTTPConnection = made
    return connection


def retry_after(headers: http.client.HTTPMessage, now: float, most: float) -> float | None:
    """The wait in seconds that Retry-After asks for, as seconds or a date; at most `most`."""
    given = headers.get("retry-after", "").strip()
    try:
        wait = float(given) if given.isdecimal() else parsedate_to_datetime(given).timestamp() - now
    except (ValueError, OverflowError):  # neither of them, or no header
        return None
    return min(max(wait, 0.0), most)


def open_socket(host: str, port: int, deadline: float, networks: Networks | None) -> socket.socket:
    """Connects to the first address that answers; each gets its share of the time. Connects to the very addresses that
    were checked."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    if networks is not None:
        found = permitted(found, host, networks)
    failure: OSError | None = None
    for place, (family, kind, protocol, _, address) in enumerate(found):
        opened = socket.socket(family, kind, protocol)
        try:
            opened.settimeout(_left(deadline) / (len(found) - place))
            opened.connect(address)
            opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError as error:
            opened.close()
            failure = error
        except BaseException:
            opened.close()
            raise
        else:
            return opened
    raise failure or OSError(f"{host} has no address")


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    return left


class DeadlineSocket:
    """A socket for http.client. Sending and reading end by the deadline."""

    def __init__(self, opened: socket.socket, deadline: float) -> None:
        self._socket, self.deadline = opened, deadline

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def sendall(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            self.limit()
            rest = rest[self._socket.send(rest) :]

    def makefile(self, _mode: str) -> io.BufferedReader:
        return io.BufferedReader(_Reader(self, self._socket.makefile("rb", buffering=0)))

    def limit(self) -> None:
        """Limits the next operation to the remaining time."""
        self._socket.settimeout(_left(self.deadline))


class _Reader(io.RawIOBase):
    def __init__(self, limited: DeadlineSocket, raw: socket.SocketIO) -> None:
        self._limited, self._raw = limited, raw

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._limited.limit()
        return self._raw.readinto(buffer)

    def close(self) -> None:
        super().close()
        self._raw.close()
