"""The class of all connections to PostgreSQL: every wait has a limit, every transaction names its isolation level, and
behind a connection pooler nothing is kept in the session.

A pooler (PgBouncer in transaction mode) may give each transaction another backend. A prepared statement, a SET or a
LISTEN would stay with a backend that the next client gets.
"""

from __future__ import annotations

import os
import re
import select
import time
from abc import abstractmethod
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import UTC, datetime, timedelta
from functools import cache
from importlib import resources
from typing import Any, LiteralString, NamedTuple, Self

import psycopg
from psycopg import IsolationLevel, generators
from psycopg.adapt import Buffer, Loader
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.pq import Format, TransactionStatus
from psycopg.pq.abc import PGconn

from custody.store import packed

CONNECT = 10
"""Timeout of connecting, in seconds."""
SILENCE = 10.0
"""Seconds without an answer, after which the server is probed on another connection."""
PROBE = 5
"""Timeout of the probe, in seconds."""
GRACE = 5.0
"""Seconds to wait for an answer beyond the statement timeout."""
POOLER_SILENCE = 120.0
"""Timeout of the probe behind a pooler: while all backends are busy, the probe waits too. PgBouncer's own limit for a
client that waits for a backend is the same (query_wait_timeout)."""
PREPARED_AFTER = 2
"""A statement is prepared when it has run this often on a connection, unless there is a pooler."""
TCP = {"keepalives_idle": 10, "keepalives_interval": 5, "keepalives_count": 4, "tcp_user_timeout": 30_000}
"""Keepalives: a host that disappears closes no connection, so it is detected after half a minute."""

GONE = "gone"

_BY_THE_SERVER = re.compile(r"failed: \S+: {2}")
_EPOCH = datetime(2000, 1, 1, tzinfo=UTC)


class Silent(psycopg.OperationalError):
    """The server does not answer. The connection is closed."""


class Waiting:
    """One wait for an answer."""

    def __init__(self) -> None:
        self.since = time.monotonic()
        self.look = self.since + SILENCE
        self.cancelled = False
        self.hopeless = False
        self._idle = 0

    @property
    def so_far(self) -> float:
        return time.monotonic() - self.since

    def something_came(self) -> None:
        """Restarts the time until the probe: a long answer over a slow line is not silence."""
        self.look = time.monotonic() + SILENCE
        self._idle = 0

    def goes_on(self, backend: Backend) -> bool:
        """Probes the server. True if the answer of the backend may still come."""
        return self.may_come(backend.state(self.so_far))

    def may_come(self, state: str | None) -> bool:
        """Whether the answer of a backend that was found in this state may still come."""
        # idle: the statement has not arrived, or its answer was lost; seen only once, it may be on its way
        self._idle = self._idle + 1 if state is not None and state.startswith("idle") else 0
        self.look = time.monotonic() + SILENCE
        return state is not None and state != GONE and self._idle < 2

    def silent(self) -> Silent:
        return Silent(f"it has not answered for {self.so_far:.0f} s")


class Backend(NamedTuple):
    """The server process that has to answer."""

    url: str
    """The URL of its server alone."""
    pid: int | None
    """None while it is unknown."""
    pooled: bool

    def state(self, waited: float) -> str | None:
        """Its state in pg_stat_activity, read on another connection; empty if unknown; None if the server does not
        answer."""
        try:
            with _Limited.connect(self.url, connect_timeout=PROBE, autocommit=True) as other:
                other.answer_within = PROBE
                found = other.execute(
                    "SELECT coalesce(state, '') FROM pg_stat_activity WHERE pid = %s", [self.pid], prepare=False
                ).fetchone()
        except Silent:
            return "" if self.pooled and waited < POOLER_SILENCE else None
        except psycopg.Error as error:
            # a refusal, such as too many connections, is an answer too
            return "" if error.sqlstate is not None or _BY_THE_SERVER.search(str(error)) else None
        if self.pooled or self.pid is None:
            return ""
        return GONE if found is None else str(found[0])


class Bounds:
    """Ends the waits of a connection: after `answer_within` seconds without an answer."""

    answer_within: float | None = PROBE
    pgconn: PGconn

    def _bounded(self, gen: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
        """Wraps the driver's wait: whenever nothing arrived for a tenth of a second, it may be ended."""
        try:
            ready = yield next(gen)
            while ready:
                ready = yield gen.send(ready)
            waiting = Waiting()
            while True:
                if ready:
                    waiting.something_came()
                else:
                    self._nothing_yet(waiting)
                ready = yield gen.send(ready)
        except StopIteration as done:
            return done.value

    def _nothing_yet(self, waiting: Waiting) -> None:
        if self.answer_within is not None and waiting.so_far > self.answer_within:
            raise self._give_up(waiting)

    def _give_up(self, waiting: Waiting) -> Silent:
        self.pgconn.finish()
        return waiting.silent()


class _Limited(Bounds, psycopg.Connection[Any]):
    """A connection that waits at most `answer_within` seconds for an answer."""

    def wait(self, gen: Generator[Any, Any, Any], *settings: Any, **more: Any) -> Any:
        try:
            return super().wait(self._bounded(gen), *settings, **more)
        except KeyboardInterrupt:
            # The generator in which it was raised has ended: ours, or the driver's too. The driver has cancelled the
            # statement, but could not read the answer, without which the connection would stay in use.
            for rest in (gen, generators.fetch_many(self.pgconn)):
                if self.pgconn.transaction_status == TransactionStatus.ACTIVE:
                    with suppress(psycopg.Error):
                        super().wait(rest, timeout=PROBE)
            raise


class Session(Bounds):
    """What a connection finds out about its server when it is opened, and what follows from that."""

    pooled = False
    """There is a pooler, which may give each transaction another backend."""
    isolation_default = "read committed"
    """The database's default isolation level."""
    limit: float | None = None
    """The statement timeout, in seconds."""
    answer_within: float | None = None
    info: psycopg.ConnectionInfo
    adapters: psycopg.adapt.AdaptersMap
    prepare_threshold: int | None
    _url = ""

    def _question(self, limit: float | None) -> tuple[LiteralString, dict[str, Any]]:
        """The statement that detects a pooler and sets up the session."""
        self.limit = limit
        self.answer_within = None if limit is None else limit + GRACE
        milliseconds = None if limit is None else str(round(limit * 1000))
        return _session(), {"client_pid": self.info.backend_pid, "statement_timeout": milliseconds}

    def _answered(self, row: Any) -> None:
        direct, self.isolation_default = row[:2]
        if not direct:
            self.pooled = True
            self.prepare_threshold = None
            self.adapters.register_loader("timestamptz", _UtcLoader)

    @property
    def names_level(self) -> bool:
        """Whether a single statement would not run at READ COMMITTED: behind a pooler, where a session cannot be set
        up, if the database has another default."""
        return self.pooled and self.isolation_default not in ("read committed", "read uncommitted")

    @property
    def stale(self) -> bool:
        """Whether data arrived on an idle connection, which means that the server closes it. The check costs no round
        trip."""
        if self.pgconn.transaction_status != TransactionStatus.IDLE:  # or it is closed
            return True
        arrived = select.poll()
        arrived.register(self.pgconn.socket, select.POLLIN)
        return bool(arrived.poll(0))

    @contextmanager
    def answering(self, within: float) -> Iterator[None]:
        """A context with another limit of the wait for answers."""
        usual, self.answer_within = self.answer_within, within
        try:
            yield
        finally:
            self.answer_within = usual

    def _nothing_yet(self, waiting: Waiting) -> None:
        if self.pooled and self.limit is not None and waiting.so_far > self.limit and not waiting.cancelled:
            waiting.cancelled = True  # behind a pooler no session has a statement timeout
            self._cancel()
            return
        super()._nothing_yet(waiting)
        if time.monotonic() > waiting.look and not self._goes_on(waiting):
            raise self._give_up(waiting)

    @abstractmethod
    def _cancel(self) -> None:
        """Cancels the statement, or begins to. If that fails, the client gives up a little later."""

    @abstractmethod
    def _goes_on(self, waiting: Waiting) -> bool:
        """Probes the server. False if no answer will come."""

    @property
    def backend(self) -> Backend:
        """The backend, with the URL of exactly its server: the original URL may have several hosts or addresses, and
        another server does not know the backend."""
        here = make_conninfo(
            self._url,
            host=self.info.host,
            hostaddr=self.info.hostaddr or None,
            port=self.info.port,
            target_session_attrs="any",
        )
        return Backend(here, self.info.backend_pid, self.pooled)


class BoundedConnection(Session, _Limited):
    """A connection without unlimited waits."""

    @classmethod
    def connect(cls, conninfo: str = "", **settings: Any) -> Self:
        """psycopg's `connect` with timeouts. Timeouts in the URL take precedence.

        `statement_timeout`, in seconds: a statement that takes longer is cancelled.
        """
        url, limit = own_settings(conninfo, settings)
        made = super().connect(url, **settings)
        try:
            made._url = url
            packed.register(made)
            made._look(limit)
        except BaseException:
            made.close()
            raise
        return made

    def _look(self, limit: float | None) -> None:
        """Detects a pooler, and sets up the session."""
        own, self.autocommit = self.autocommit, True
        self._answered(self.execute(*self._question(limit), prepare=False).fetchone())
        self.autocommit = own
        self.isolation_level = IsolationLevel.READ_COMMITTED

    def level(self) -> AbstractContextManager[object]:
        """A context in which statements run at READ COMMITTED, in autocommit mode too."""
        return self.transaction() if self.names_level else nullcontext()

    def _cancel(self) -> None:
        with suppress(psycopg.Error):
            self.cancel_safe(timeout=PROBE)

    def _goes_on(self, waiting: Waiting) -> bool:
        return waiting.goes_on(self.backend)


def own_settings(conninfo: str, settings: dict[str, Any]) -> tuple[str, float | None]:
    """The URL to connect to, and the statement timeout. Completes the settings for the driver."""
    limit: float | None = settings.pop("statement_timeout", None)
    settings.setdefault("client_encoding", "UTF8")
    settings.setdefault("prepare_threshold", PREPARED_AFTER)
    timeout = settings.pop("connect_timeout", None)
    url = with_timeouts(conninfo)
    return url if timeout is None else make_conninfo(url, connect_timeout=timeout), limit


class _UtcLoader(Loader):
    """Loads times as UTC, whatever the time zone of the session."""

    format = Format.BINARY

    def load(self, data: Buffer) -> datetime:
        return _EPOCH + timedelta(microseconds=int.from_bytes(data, "big", signed=True))


@cache
def _session() -> LiteralString:
    # a file of our own package counts as a literal
    return resources.files("custody.store").joinpath("sql", "session.sql").read_text(encoding="utf-8")


def with_timeouts(url: str) -> str:
    """Adds timeouts and keepalives to a URL, unless it has its own."""
    given = conninfo_to_dict(url)
    missing: dict[str, int] = {name: value for name, value in TCP.items() if name not in given}
    if "connect_timeout" not in given and "PGCONNECT_TIMEOUT" not in os.environ:
        missing["connect_timeout"] = CONNECT
    return make_conninfo(url, **missing)
