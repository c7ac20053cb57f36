"""The HTTP connections of a relay to another Custody: each request has a deadline, and only permitted addresses are
connected to."""

from __future__ import annotations

import socket
import time
from functools import partial
from typing import Any

from urllib3 import HTTPConnectionPool, PoolManager
from urllib3.connection import HTTPConnection, HTTPSConnection

from custody.relay.addresses import Networks
from custody.relay.deadline import DeadlineSocket, open_socket


class ClientPool(PoolManager):
    """A pool whose requests take at most `seconds`, to addresses that `networks` permit; None permits any."""

    def __init__(self, seconds: float, networks: Networks | None, **options: Any) -> None:
        super().__init__(**options)
        self._made = {
            "http": partial(_PlainConnection, seconds, networks),
            "https": partial(_SecureConnection, seconds, networks),
        }

    def _new_pool(self, scheme: str, host: str, port: int, request_context: Any = None) -> HTTPConnectionPool:
        pool = super()._new_pool(scheme, host, port, request_context)
        pool.ConnectionCls = self._made[scheme]  # type: ignore[assignment]  # urllib3 only calls it
        return pool


class _PlainConnection(HTTPConnection):
    def __init__(self, seconds: float, networks: Networks | None, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._seconds, self._networks = seconds, networks
        self._deadline, self._fresh = 0.0, False

    def _new_conn(self) -> socket.socket:
        return open_socket(self.host.strip("[]"), self.port, self._deadline, self._networks)

    def connect(self) -> None:
        self._deadline, self._fresh = time.monotonic() + self._seconds, True
        super().connect()
        assert self.sock is not None
        self.sock = DeadlineSocket(self.sock, self._deadline)

    def request(self, *args: Any, **options: Any) -> None:
        if isinstance(self.sock, DeadlineSocket) and not self._fresh:
            self.sock.deadline = time.monotonic() + self._seconds
        super().request(*args, **options)
        self._fresh = False


class _SecureConnection(_PlainConnection, HTTPSConnection):
    pass
