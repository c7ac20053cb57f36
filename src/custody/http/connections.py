"""The connections of a server: limits their number, closes some to make room, and closes those that read too slowly.

A connection is trusted once a request on it has shown a valid key (on a server without keys: once a request was
admitted). After a second, connections that are not trusted may use a quarter of each limit, and the oldest of them is
closed first. A client that has a key shows it at once, so clients without a key cannot lock out clients with one.
"""

from __future__ import annotations

import asyncio
import fcntl
import ipaddress
import sys
import termios
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

SHARE = 4
"""Connections that are not trusted may be one in this many."""
MOMENT = 1.0
"""Seconds for a new connection to become trusted, while there is room: after a restart many connect at once."""
SLOWEST = 1024
"""Bytes per second that a client has to read while data waits for it."""
SOON = 2.0
"""Seconds: replaces the write timeout while the memory for answers is full."""
_PREFIX = 64
"""Bits of an IPv6 address that identify a client: who has one address usually has its whole /64 network."""


class Connection:
    """One connection. `idle` tells whether no request on it is being served."""

    __slots__ = ("_mark", "_since", "address", "idle", "made", "secured", "transport", "trusted", "written")

    def __init__(self, transport: asyncio.Transport, address: str, made: float) -> None:
        self.transport, self.address, self.made = transport, address, made
        self.secured: asyncio.Transport | None = None
        self.trusted = False
        self.idle: Callable[[], bool] = lambda: True
        self.written = 0
        """Bytes that were passed to the transport."""
        self._mark, self._since = 0, 0.0

    @property
    def waiting(self) -> int:
        """Bytes that the client has not read yet."""
        inner = 0 if self.secured is None else self.secured.get_write_buffer_size()
        return inner + self.transport.get_write_buffer_size()

    def stalls(self, now: float, timeout: float) -> bool:
        """Whether the client has read less than SLOWEST for `timeout` seconds. Called at regular intervals."""
        waiting = self.waiting
        # the socket buffer of the kernel counts as unread too: it can hold megabytes, and is refilled only when a third
        # of it is free
        taken = self.written - waiting - (_sent(self.transport) if waiting else 0)
        if not waiting or taken - self._mark >= SLOWEST * timeout or not self._since:
            self._mark, self._since = taken, now if waiting else 0.0
            return False
        return now - self._since >= timeout


class CountingTransport:
    """A transport that counts the bytes written to it."""

    def __init__(self, transport: asyncio.Transport, connection: Connection) -> None:
        self._transport, self._connection = transport, connection
        self.is_closing = transport.is_closing  # called for each request
        self._holds, self._held = False, b""

    def hold(self) -> None:
        """Keeps what is written next, to write it with what follows: a head and its body are one write to the
        socket, and mostly one read of the client."""
        self._holds = True

    def write(self, data: bytes) -> None:
        if self._holds:
            self._holds, self._held = False, data
            return
        if self._held:
            data, self._held = self._held + data, b""
        self._connection.written += len(data)
        self._transport.write(data)

    def close(self) -> None:
        self._holds = False
        if self._held:
            self.write(b"")
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class _Share:
    """The connections of one client address, or of all. Both dicts are ordered by age, oldest first."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.others: dict[Connection, None] = {}
        self.trusted: dict[Connection, None] = {}

    def __len__(self) -> int:
        return len(self.others) + len(self.trusted)

    def __iter__(self) -> Iterator[Connection]:
        yield from self.others
        yield from self.trusted

    def add(self, connection: Connection) -> None:
        (self.trusted if connection.trusted else self.others)[connection] = None

    def remove(self, connection: Connection) -> None:
        self.others.pop(connection, None)
        self.trusted.pop(connection, None)

    def surplus(self, now: float) -> tuple[bool, Connection | None]:
        """Whether the limit is reached, and the connection to close for a new one, if any."""
        oldest = next(iter(self.others), None)
        if len(self) >= self.most:
            return True, oldest or next((one for one in self.trusted if one.idle()), None)
        many = len(self.others) >= max(1, self.most // SHARE)
        return False, oldest if many and oldest is not None and now - oldest.made >= MOMENT else None


class Connections:
    """All connections of a server process. Used in its event loop."""

    def __init__(
        self,
        *,
        most: int,
        for_each: int,
        write_timeout: float,
        full: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._all, self._for_each = _Share(most), for_each
        self._addresses: dict[str, _Share] = {}
        self._write_timeout, self._full, self._clock = write_timeout, full, clock
        self._looking: asyncio.TimerHandle | None = None
        self.closed: Counter[str] = Counter({"crowded": 0, "refused": 0, "unread": 0})
        """Connections closed to make room, refused at once, and closed because the client did not read the answer."""

    def admit(self, transport: asyncio.Transport) -> Connection | None:
        """Registers a new connection, and closes another if there are too many; None if there is no room."""
        address, now = client_of(transport), self._clock()
        here = self._addresses.get(address) or _Share(self._for_each)
        for share in (here, self._all):
            crowded, victim = share.surplus(now)
            if crowded and victim is None:
                self.closed["refused"] += 1
                return None
            if victim is not None:
                self.cut(victim, "crowded")
        connection = Connection(transport, address, now)
        self._addresses.setdefault(address, here).add(connection)
        self._all.add(connection)
        if self._looking is None:
            self._look_later()
        return connection

    def trust(self, connection: Connection) -> None:
        if connection.trusted or connection not in self._all.others:
            return
        connection.trusted = True
        for share in (self._all, self._addresses[connection.address]):
            share.remove(connection)
            share.add(connection)

    def cut(self, connection: Connection, reason: str) -> None:
        """Closes a connection without waiting for its client."""
        self.closed[reason] += 1
        self.forget(connection)
        connection.transport.abort()

    def forget(self, connection: Connection) -> None:
        """Removes a connection that has ended."""
        self._all.remove(connection)
        here = self._addresses.get(connection.address)
        if here is not None:
            here.remove(connection)
            if not len(here):
                del self._addresses[connection.address]

    def count(self) -> tuple[int, int]:
        """The number of trusted connections, and of the others."""
        return len(self._all.trusted), len(self._all.others)

    def waiting(self) -> int:
        """Bytes that clients have not read yet."""
        return sum(one.waiting for one in self._all)

    def close(self) -> None:
        """Stops the regular checks, and closes all connections."""
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None
        for connection in list(self._all):
            self.forget(connection)
            connection.transport.abort()

    def _look_later(self) -> None:
        pause = min(1.0, self._write_timeout / 4)
        self._looking = asyncio.get_running_loop().call_later(pause, self._look)

    def _look(self) -> None:
        """Closes the connections whose clients do not read."""
        timeout = min(self._write_timeout, SOON) if self._full() else self._write_timeout
        now = self._clock()
        for connection in [one for one in self._all if one.stalls(now, timeout)]:
            self.cut(connection, "unread")
        self._looking = None
        if len(self._all):
            self._look_later()


def _sent(transport: asyncio.BaseTransport) -> int:
    """Bytes in the kernel's send buffer that the client has not acknowledged."""
    try:
        found = fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
    except OSError:  # it is closed, or the system does not support this
        return 0
    return int.from_bytes(found, sys.byteorder)


def client_of(transport: asyncio.BaseTransport) -> str:
    """The address of the client; for IPv6 its network."""
    peer = transport.get_extra_info("peername")
    if not isinstance(peer, tuple) or not peer:
        return "-"
    host = str(peer[0]).partition("%")[0]
    if ":" not in host:
        return host
    address = ipaddress.IPv6Address(host)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((address, _PREFIX), strict=False))
