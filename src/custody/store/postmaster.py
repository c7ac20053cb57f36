"""The home of an embedded PostgreSQL: its locks, and starting, checking and stopping its server.

A home contains `data` (the data directory), `run` (the socket, if its path is short enough), `server.conf` (written at
each start), `server.log`, and three lock files:

- `start.lock` is held exclusively by whoever starts, joins or stops the server;
- `users.lock` is held shared by every process that uses the server (see `custody.store.embedded`);
- `server.lock` is held by the server's own processes, which inherit it. It tells a crashed server from a live one
  without trusting process ids, which are reused when a container restarts with the same volume.

The kernel drops all three with the processes that hold them, so a kill -9 leaves nothing to clean up.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from psycopg import pq

from custody.errors import EmbeddedError
from custody.store.cluster import DATABASE, binaries, prepare, remove_socket_dir, spawn
from custody.store.server_user import ServerUser, choose, open_private, private_directory

TIMEOUT = 60.0  # seconds; recovery after a crash replays up to max_wal_size of write-ahead log
POLL = 0.005
LOG_LIMIT = 10 * 1024 * 1024
PROC = Path("/proc/self/cwd").exists()
# Descriptors of locks held by this process. A forked child closes its copies at once: a lock lives as long as any
# copy of its descriptor, so a child would otherwise keep its dead parent registered as a user.
held: set[int] = set()


@dataclass(frozen=True, kw_only=True)
class Postmaster:
    """The content of `postmaster.pid`, which may be stale."""

    pid: int
    port: str
    socket_dir: str
    status: str

    @property
    def url(self) -> str:
        """The libpq URL of the database; it names the port so that PGPORT in the environment cannot redirect it."""
        return f"postgresql://postgres@/{DATABASE}?host={quote(os.fsencode(self.socket_dir), safe='')}&port={self.port}"

    def answers(self) -> bool:
        """Whether a server accepts connections on the socket right now."""
        return pq.PGconn.ping(f"{self.url}&connect_timeout=5".encode()) == pq.Ping.OK


@dataclass(frozen=True, kw_only=True)
class Home:
    """A directory with an embedded server; `alive`, `ensure_running` and `stop` need `start.lock` held."""

    path: Path
    user: ServerUser

    @classmethod
    def at(cls, path: Path) -> Home:
        """The home at `path`, with links resolved; it need not exist."""
        path = Path(os.path.realpath(path.expanduser()))
        try:
            return cls(path=path, user=choose(path / "data"))
        except OSError as error:
            raise EmbeddedError(f"{path} cannot be used: {error}. Choose another home (CUSTODY_HOME).") from error

    def make(self) -> None:
        """Make the directory with its parents if it is missing; an existing one keeps its owner and mode."""
        try:
            if not self.path.exists():
                self.path.parent.mkdir(parents=True, exist_ok=True)
                private_directory(self.path, self.user)
        except OSError as error:
            raise EmbeddedError(f"{self.path} cannot be made: {error}. Choose another home (CUSTODY_HOME).") from error

    @property
    def data_dir(self) -> Path:
        return self.path / "data"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold `start.lock`; waits for its holder. Raises FileNotFoundError if the home has been deleted."""
        descriptor = self.open_lock("start.lock")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            release(descriptor)

    def open_lock(self, name: str) -> int:
        """A descriptor of a lock file, not locked yet. Close it with `release`."""
        descriptor = open_private(self.path / name, self.user)
        held.add(descriptor)
        return descriptor

    def postmaster(self) -> Postmaster | None:
        """Reads `postmaster.pid`, without checking whether it is stale."""
        try:
            lines = os.fsdecode((self.data_dir / "postmaster.pid").read_bytes()).split("\n")
            pid, port, socket_dir, status = int(lines[0]), lines[3], lines[4], "".join(lines[7:8]).strip()
        except (FileNotFoundError, ValueError, IndexError):
            return None
        return Postmaster(pid=pid, port=port, socket_dir=socket_dir, status=status)

    def alive(self) -> bool:
        """Whether any process of this home's server lives, however it was started."""
        descriptor = self.open_lock("server.lock")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            release(descriptor)
        return self._postmaster_lives()

    def ensure_running(self, settings: Mapping[str, str]) -> Postmaster:
        """Join the server if it runs, start it if it does not, and return when it accepts connections."""
        deadline = time.monotonic() + TIMEOUT
        launched: subprocess.Popen[bytes] | None = None
        while True:
            found, alive = self.postmaster(), self.alive()
            if alive and found is not None and found.status == "ready" and found.answers():
                return found
            if not alive and launched is None:
                launched = self._launch(settings)
            elif launched is not None and launched.poll() is not None:
                raise EmbeddedError(f"PostgreSQL did not start. The end of {self.path / 'server.log'}:\n{self._log()}")
            if time.monotonic() > deadline:
                raise EmbeddedError(
                    f"PostgreSQL in {self.path} runs but accepts no connections after {TIMEOUT:.0f} s; if it recovers "
                    f"from a crash, retry later. The end of {self.path / 'server.log'}:\n{self._log()}"
                )
            time.sleep(POLL)

    def stop(self, how: signal.Signals) -> None:
        """Send the signal of a shutdown mode and return when no process of the server is left."""
        deadline = time.monotonic() + TIMEOUT
        signalled: Postmaster | None = None
        while self.alive():
            found = self.postmaster()
            # One that has only just been started has not written its process id yet.
            if signalled is None and found is not None and self._postmaster_lives():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(found.pid, how)
                signalled = found
            if time.monotonic() > deadline:
                raise EmbeddedError(f"PostgreSQL in {self.path} has not stopped after {TIMEOUT:.0f} s; see server.log.")
            time.sleep(POLL)
        if signalled is not None:
            remove_socket_dir(signalled.socket_dir)

    def _postmaster_lives(self) -> bool:
        found = self.postmaster()
        if found is None:
            return False
        try:
            if PROC:
                # A zombie, or another process with a reused id, has another working directory.
                return Path(f"/proc/{found.pid}/cwd").samefile(self.data_dir)
            os.kill(found.pid, 0)
        except OSError:
            return False
        return True

    def _launch(self, settings: Mapping[str, str]) -> subprocess.Popen[bytes]:
        prepare(self.path, self.user, settings)
        # No process of the server lives, so its process id file is stale; PostgreSQL itself would refuse to start if
        # an unrelated process had that id by now.
        (self.data_dir / "postmaster.pid").unlink(missing_ok=True)
        log_file = self.path / "server.log"
        if log_file.exists() and log_file.stat().st_size > LOG_LIMIT:
            log_file.replace(self.path / "server.log.1")
        log = open_private(log_file, self.user, os.O_APPEND)
        lock = self.open_lock("server.lock")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            process = spawn(
                self.user,
                [binaries() / "postgres", "-D", self.data_dir, "-c", f"config_file={self.path / 'server.conf'}"],
                stdout=log,
                stderr=log,
                pass_fds=[lock],
                start_new_session=True,  # the Ctrl-C meant for this process must not reach the server
            )
        finally:
            # Closed, not unlocked: the server's copy keeps the lock.
            held.discard(lock)
            os.close(lock)
            os.close(log)
        threading.Thread(target=process.wait, name="custody-reaper", daemon=True).start()
        return process

    def _log(self) -> str:
        try:
            with (self.path / "server.log").open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 16_384))
                return "\n".join(file.read().decode(errors="replace").splitlines()[-20:])
        except OSError as error:
            return f"({error})"


def release(descriptor: int) -> None:
    """Unlock and close. Unlocked explicitly, because a child forked meanwhile may still have a copy."""
    held.discard(descriptor)
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)
