"""An embedded PostgreSQL that starts with its first user and stops with its last one, across threads and processes.

Every process that uses a home's server holds `users.lock` shared. Processes join and leave under `start.lock`, so the
last one to leave can stop the server without another joining meanwhile. The kernel drops the locks of a killed process:
if all users are killed, the server goes on, the next `acquire` joins it, and the last one to close stops it as usual. A
process ended by a signal that Python does not turn into an exit counts as killed.
"""

from __future__ import annotations

import atexit
import fcntl
import logging
import os
import signal
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Literal, Self

from custody.errors import EmbeddedError
from custody.store.cluster import binaries
from custody.store.postmaster import Home, held, release

__all__ = ["EmbeddedError", "EmbeddedServer", "acquire", "binaries", "exists", "running", "stop"]

logger = logging.getLogger(__name__)

NO_SETTINGS: Mapping[str, str] = MappingProxyType({})
MODES = {"fast": signal.SIGINT, "immediate": signal.SIGQUIT}


@dataclass(frozen=True, kw_only=True, eq=False)
class EmbeddedServer:
    """One claim on a running server: it is not stopped, except by a crash or `stop`, until this is closed.

    Every `acquire` returns its own; all those of a process and home share one membership. A forked child does not
    inherit the claim (`close` does nothing there): it calls `acquire` itself if it is to outlive its parent.
    """

    url: str
    home: Path
    data_dir: Path
    bin_dir: Path

    @property
    def pid(self) -> int | None:
        """The process id in `postmaster.pid`, None while there is no such file."""
        postmaster = Home.at(self.home).postmaster()
        return None if postmaster is None else postmaster.pid

    def close(self) -> None:
        """Give the claim back, once. The last one of all processes stops the server, and returns when it has shut
        down."""
        with _guard:
            membership = _memberships.get(self.home)
            if membership is None or self not in membership.claims:
                return
            membership.claims.remove(self)
            if not membership.claims:
                del _memberships[self.home]
                membership.leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


@dataclass(frozen=True, kw_only=True, eq=False)
class _Membership:
    """This process as a user of one home; lives as long as it has claims."""

    home: Home
    users_lock: int
    claims: set[EmbeddedServer] = field(default_factory=set)

    @classmethod
    def join(cls, home: Home) -> _Membership:
        """Register as a user. With `start.lock` held this never waits: nobody else can be stopping the server."""
        users_lock = home.open_lock("users.lock")
        fcntl.flock(users_lock, fcntl.LOCK_SH)
        return cls(home=home, users_lock=users_lock)

    def leave(self) -> None:
        """Stop being a user, and stop the server if there is no other."""
        try:
            with self.home.locked():
                try:
                    self.stop_if_alone()
                finally:
                    # Still under `start.lock`, or the next one to leave could take this process for a user.
                    release(self.users_lock)
        except FileNotFoundError:
            # A server whose home has been deleted ends by itself within a minute.
            logger.warning("%s was deleted while its server was running", self.home.path)
        finally:
            if self.users_lock in held:
                release(self.users_lock)

    def stop_if_alone(self) -> None:
        """Stop the server unless another process uses it. The membership has to be released after this."""
        try:
            # A failed upgrade may lose the shared lock, so there is no way back from here.
            fcntl.flock(self.users_lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        self.home.stop(signal.SIGINT)


_guard = threading.Lock()
_memberships: dict[Path, _Membership] = {}


def acquire(home: Path, *, settings: Mapping[str, str] = NO_SETTINGS) -> EmbeddedServer:
    """Start the server of `home`, or join it if it runs, and return when it accepts connections.

    Makes the home, its data directory and the database `custody` if they are missing, and recovers a crashed server.
    `settings` override the defaults of PostgreSQL's configuration when this call starts the server; a server that
    runs already keeps its own. Safe to call from any thread and from many processes at once.
    """
    with _guard:
        place = Home.at(home)
        bin_dir = binaries()
        place.make()
        with place.locked():
            membership = _memberships.get(place.path)
            joined = membership is None
            if membership is None:
                membership = _Membership.join(place)
            try:
                postmaster = place.ensure_running(settings)
            except BaseException as error:
                if joined:
                    # A server that is recovering from a crash goes on: stopping it would restart the recovery.
                    if not isinstance(error, EmbeddedError):
                        membership.stop_if_alone()
                    release(membership.users_lock)
                raise
            server = EmbeddedServer(url=postmaster.url, home=place.path, data_dir=place.data_dir, bin_dir=bin_dir)
            membership.claims.add(server)
            _memberships[place.path] = membership
            return server


def exists(home: Path) -> bool:
    """Whether a database has been made in `home`."""
    return Home.at(home).data_dir.exists()


def running(home: Path) -> str | None:
    """The URL of a server that accepts connections in `home`; None if there is none. It starts and joins nothing."""
    postmaster = Home.at(home).postmaster()
    return postmaster.url if postmaster is not None and postmaster.answers() else None


def stop(home: Path, mode: Literal["fast", "immediate"] = "fast") -> None:
    """Stop the server of `home` even if it is used, and return when it is gone; for maintenance and for chaos tests.

    "fast" ends the sessions and writes a checkpoint, "immediate" is a crash. The next `acquire` in any process, also
    one that holds a claim already, starts it again.
    """
    how = MODES[mode]
    place = Home.at(home)
    if place.data_dir.exists():
        with place.locked():
            place.stop(how)


def _close_all() -> None:
    with _guard:
        for path in list(_memberships):
            try:
                _memberships.pop(path).leave()
            except Exception:
                logger.exception("The server in %s was not stopped", path)


def _forget() -> None:
    """In a forked child: close the copies of the locks without unlocking them, which would unlock the parent's."""
    global _guard
    _guard = threading.Lock()
    _memberships.clear()
    while held:
        os.close(held.pop())


atexit.register(_close_all)
os.register_at_fork(after_in_child=_forget)
