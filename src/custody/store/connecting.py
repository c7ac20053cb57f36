"""How every connection to PostgreSQL is opened: each wait on it ends, its transactions name their isolation level, and
behind a connection pooler it keeps nothing in the session.

A pooler (PgBouncer in transaction mode) gives each transaction another backend. A prepared statement, a SET or a LISTEN
would stay with a backend that the next client gets.
"""

from __future__ import annotations

import os
import re
import select
import time
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import UTC, datetime, timedelta
from functools import cache
from importlib import resources
from typing import Any, LiteralString, NamedTuple, Self, cast

import psycopg
from psycopg import IsolationLevel
from psycopg.adapt import Buffer, Loader
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.pq import Format, TransactionStatus

CONNECT = 10
"""Seconds for opening a connection."""
SILENCE = 10.0
"""After so many seconds without an answer the server is asked, on another connection, whether it is there at all."""
PROBE = 5
"""Seconds for that answer."""
GRACE = 5.0
"""So much longer than its statement timeout the answer to a statement is waited for."""
POOLER_SILENCE = 120.0
"""Behind a pooler that answer may take so many seconds: while all backends are at work, the question waits as well.
PgBouncer itself gives up a client that has waited for a backend as long (query_wait_timeout)."""
PREPARED_AFTER = 2
"""A statement is prepared when it was run so often on a connection, unless a pooler is in between."""
TCP = {"keepalives_idle": 10, "keepalives_interval": 5, "keepalives_count": 4, "tcp_user_timeout": 30_000}
"""A host that is gone closes no connection: it is given up after half a minute."""

GONE = "gone"

_BY_THE_SERVER = re.compile(r"failed: \S+: {2}")
_EPOCH = datetime(2000, 1, 1, tzinfo=UTC)


class Silent(psycopg.OperationalError):
    """The server does not answer. Its connection is closed."""


class Waiting:
    """One wait for an answer, from when nothing came for the first time."""

    def __init__(self) -> None:
        self.since = time.monotonic()
        self.look = self.since + SILENCE
        self.cancelled = False
        self._idle = 0

    @property
    def so_far(self) -> float:
        return time.monotonic() - self.since

    def something_came(self) -> None:
        """Whoever sends a long answer over a slow line is not silent."""
        self.look = time.monotonic() + SILENCE
        self._idle = 0

    def goes_on(self, backend: Backend) -> bool:
        """Asks the server about the backend: whether its answer may still come."""
        state = backend.state(self.so_far)
        # idle: what was sent has not arrived, or its answer was lost; seen once, it may just be on its way
        self._idle = self._idle + 1 if state is not None and state.startswith("idle") else 0
        self.look = time.monotonic() + SILENCE
        return state is not None and state != GONE and self._idle < 2

    def silent(self) -> Silent:
        return Silent(f"it has not answered for {self.so_far:.0f} s")


class Backend(NamedTuple):
    """Whose answer is waited for."""

    url: str
    """Of its very server."""
    pid: int | None
    """None while it is not known."""
    pooled: bool

    def state(self, waited: float) -> str | None:
        """What it is doing, as another connection sees it; empty if that cannot be told; None if the server answers
        nobody."""
        try:
            with _Limited.connect(self.url, connect_timeout=PROBE, autocommit=True) as other:
                other.answer_within = PROBE
                found = other.execute(
                    "SELECT coalesce(state, '') FROM pg_stat_activity WHERE pid = %s", [self.pid], prepare=False
                ).fetchone()
        except Silent:
            return "" if self.pooled and waited < POOLER_SILENCE else None
        except psycopg.Error as error:
            # a refusal (too many connections) is an answer too
            return "" if error.sqlstate is not None or _BY_THE_SERVER.search(str(error)) else None
        if self.pooled or self.pid is None:
            return ""
        return GONE if found is None else str(found[0])


class _Limited(psycopg.Connection[Any]):
    """A connection on which nobody waits longer than `answer_within` seconds for an answer."""

    answer_within: float | None = PROBE

    def wait(self, gen: Generator[Any, Any, Any], *settings: Any, **more: Any) -> Any:
        try:
            return super().wait(self._bounded(gen), *settings, **more)
        except KeyboardInterrupt:
            # If it came within our own generator, that one has ended. The driver has cancelled the statement by now,
            # but could not read the answer, without which the connection would stay in use.
            if self.pgconn.transaction_status == TransactionStatus.ACTIVE:
                with suppress(psycopg.Error):
                    super().wait(gen, timeout=PROBE)
            raise

    def _bounded(self, gen: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
        """The same waiting; whenever nothing came for a while (a tenth of a second) it may be ended."""
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


class BoundedConnection(_Limited):
    """A connection on which no wait lasts for ever."""

    pooled = False
    """Another process is in between, and may give each transaction another backend."""
    isolation_default = "read committed"
    """What the database gives a transaction that names no level."""
    limit: float | None = None
    """Seconds that a statement may take."""
    answer_within: float | None = None
    _url = ""

    @classmethod
    def connect(cls, conninfo: str = "", **settings: Any) -> Self:
        """As psycopg's, with limits on the time for it. What the URL itself says of them is kept.

        `statement_timeout`, in seconds: a statement that takes longer is cancelled.
        """
        limit: float | None = settings.pop("statement_timeout", None)
        settings.setdefault("client_encoding", "UTF8")
        settings.setdefault("prepare_threshold", PREPARED_AFTER)
        timeout = settings.pop("connect_timeout", None)
        url = watched(conninfo) if timeout is None else make_conninfo(watched(conninfo), connect_timeout=timeout)
        made = super().connect(url, **settings)
        try:
            made._url = url
            made._look(limit)
        except BaseException:
            made.close()
            raise
        return made

    def _look(self, limit: float | None) -> None:
        """Finds out what is at the other end, and sets what this connection keeps."""
        self.limit = limit
        self.answer_within = None if limit is None else limit + GRACE
        milliseconds = None if limit is None else str(round(limit * 1000))
        own, self.autocommit = self.autocommit, True
        found = self.execute(
            _session(), {"client_pid": self.info.backend_pid, "statement_timeout": milliseconds}, prepare=False
        ).fetchone()
        self.autocommit = own
        direct, self.isolation_default = cast("Any", found)[:2]
        self.isolation_level = IsolationLevel.READ_COMMITTED
        if not direct:
            self.pooled = True
            self.prepare_threshold = None
            self.adapters.register_loader("timestamptz", _UtcLoader)

    @property
    def names_level(self) -> bool:
        """Whether a statement by itself would run at another level than READ COMMITTED: behind a pooler whose database
        has another default, since nothing can be set for a session there."""
        return self.pooled and self.isolation_default not in ("read committed", "read uncommitted")

    def level(self) -> AbstractContextManager[object]:
        """Within it statements run at READ COMMITTED, in autocommit mode too."""
        return self.transaction() if self.names_level else nullcontext()

    @property
    def stale(self) -> bool:
        """Whether something came over an idle connection: a server that closes it says so, or at least ends the stream.
        To look for that costs no round trip."""
        if self.pgconn.transaction_status != TransactionStatus.IDLE:  # or it is closed
            return True
        arrived = select.poll()
        arrived.register(self.fileno(), select.POLLIN)
        return bool(arrived.poll(0))

    @contextmanager
    def answering(self, within: float) -> Iterator[None]:
        """Within it no answer is waited for longer than that."""
        usual, self.answer_within = self.answer_within, within
        try:
            yield
        finally:
            self.answer_within = usual

    def _nothing_yet(self, waiting: Waiting) -> None:
        if self.pooled and self.limit is not None and waiting.so_far > self.limit and not waiting.cancelled:
            waiting.cancelled = True  # no session has a statement timeout here
            with suppress(psycopg.Error):  # then the client gives up a little later
                self.cancel_safe(timeout=PROBE)
            return
        super()._nothing_yet(waiting)
        if time.monotonic() > waiting.look and not waiting.goes_on(self.backend):
            raise self._give_up(waiting)

    @property
    def backend(self) -> Backend:
        """At the very server of this connection. Several hosts, or a name with several addresses, may lead to another
        server by now, which knows nothing of the backend."""
        here = make_conninfo(
            self._url,
            host=self.info.host,
            hostaddr=self.info.hostaddr or None,
            port=self.info.port,
            target_session_attrs="any",
        )
        return Backend(here, self.info.backend_pid, self.pooled)


class _UtcLoader(Loader):
    """Times of any session as UTC."""

    format = Format.BINARY

    def load(self, data: Buffer) -> datetime:
        return _EPOCH + timedelta(microseconds=int.from_bytes(data, "big", signed=True))


@cache
def _session() -> LiteralString:
    # a file of our own package is as good as a literal
    return resources.files("custody.store").joinpath("sql", "session.sql").read_text(encoding="utf-8")


def watched(url: str) -> str:
    """A URL whose connections are opened or given up within a time. What the URL itself says of that is kept."""
    given = conninfo_to_dict(url)
    missing: dict[str, int] = {name: value for name, value in TCP.items() if name not in given}
    if "connect_timeout" not in given and "PGCONNECT_TIMEOUT" not in os.environ:
        missing["connect_timeout"] = CONNECT
    return make_conninfo(url, **missing)
