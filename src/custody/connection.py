"""connect(): finds the database, starts it if it is embedded, and checks its schema."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from psycopg.pq import Conninfo

from custody import config
from custody.bridge import bridged, outside
from custody.engine import Custody
from custody.errors import InvalidArgument, NeedsDatabase
from custody.model import bounds
from custody.model.policy import Duration, seconds, seconds_or_none
from custody.remote import is_remote, open_remote
from custody.store import migrate as schema
from custody.store.async_postgres import AsyncDatabase
from custody.store.embedded import EmbeddedServer, acquire, binaries, exists, running
from custody.store.plan import Step, plan
from custody.store.postgres import Database

logger = logging.getLogger(__name__)


def connect(
    database: str | None = None,
    *,
    home: str | Path | None = None,
    worker: str | None = None,
    pool_size: int = 10,
    statement_timeout: Duration | None = None,
    listen_url: str | None = None,
    clock: Callable[[], datetime] | None = None,
    api_key: str | None = None,
    ca: str | Path | None = None,
    retry_for: Duration | None = None,
    allow_insecure: bool = False,
    share_commits: bool = False,
) -> Custody:
    """Opens Custody: on the `postgresql://` URL given here or by CUSTODY_DATABASE, else embedded in `home`.

    The embedded PostgreSQL (in CUSTODY_HOME, the nearest `.custody` here or above, or `./.custody`) is started if it
    does not run, shared with other processes, and stopped by the last one. Its schema is migrated automatically. In a
    database of your own the schema is created if it is missing, and changed only by `custody.migrate`. A call that
    takes longer than `statement_timeout` in the database is cancelled (`busy`). `clock` replaces the server's clock,
    for tests.

    Behind a connection pooler, which is detected, waiting consumers poll. With `listen_url` (or CUSTODY_LISTEN_URL),
    a URL of the same database that bypasses the pooler, they are woken at once.

    With `share_commits`, single publishes and acks of threads that would wait for one another go together, in one
    transaction; each still has its own answer or error. A worker turns it on. A server does it for all of its callers.

    With an `http://` or `https://` URL the verbs are called at a server (`custody serve`). `api_key` (or
    CUSTODY_API_KEY) is sent to it, and `ca` (or CUSTODY_CA) is a file of certificates to trust. A request without an
    answer is repeated, where that is safe, for `retry_for` (30 s). A key is not sent to another machine over plain
    `http://` (`insecure_key`), unless `allow_insecure` (or CUSTODY_ALLOW_INSECURE) allows it.
    """
    bounds.require("pool_size", pool_size)
    if worker is not None:
        bounds.require_text("worker", worker)
    settings = config.load()
    url, _ = _where(database, home, settings)
    if url is not None and is_remote(url):
        if clock is not None or listen_url is not None:
            what = "its own clock" if clock is not None else "its own way of listening"
            raise InvalidArgument(
                f"a server has {what}", f"Leave {'clock' if clock is not None else 'listen_url'} out."
            )
        return _remote(
            url,
            settings,
            worker=worker,
            pool_size=pool_size,
            api_key=api_key,
            ca=ca,
            retry_for=retry_for,
            allow_insecure=allow_insecure,
        )
    if listen_url is not None:
        _require_database(listen_url)
    if api_key is not None or ca is not None or retry_for is not None or allow_insecure:
        raise InvalidArgument(
            "api_key, ca, retry_for and allow_insecure are only for a server", "Give the http:// URL of a server."
        )
    timeout = seconds_or_none(statement_timeout)
    return _open(
        database,
        home,
        _prepare,
        worker=worker,
        pool_size=pool_size,
        statement_timeout=timeout,
        listen_url=listen_url,
        clock=clock,
        share_commits=share_commits,
    )


def _remote(
    url: str,
    settings: config.Config,
    *,
    worker: str | None,
    pool_size: int = 10,
    api_key: str | None = None,
    ca: str | Path | None = None,
    retry_for: Duration | None = None,
    allow_insecure: bool = False,
) -> Custody:
    return open_remote(
        url,
        api_key=api_key,
        fallback_key=settings.api_key,
        ca=ca or settings.ca,
        retry_for=retry_for,
        pool_size=pool_size,
        defaults=settings.policy,
        worker=worker,
        allow_insecure=allow_insecure or settings.allow_insecure,
    )


def connect_existing(
    database: str | None = None,
    *,
    home: str | Path | None = None,
    worker: str | None = None,
    listen_url: str | None = None,
) -> Custody | None:
    """Opens Custody like `connect`, but creates and changes nothing. None if there is no embedded database yet.

    Refuses a schema that is missing or of another version. Starts an existing embedded PostgreSQL.
    """
    settings = config.load()
    url, place = _where(database, home, settings)
    if url is None and not exists(place):
        return None
    if url is not None and is_remote(url):
        return _remote(url, settings, worker=worker)
    return _open(database, home, _check, worker=worker, listen_url=listen_url)


def connect_running(database: str | None = None, *, home: str | Path | None = None) -> Custody | None:
    """Opens Custody like `connect_existing`, and starts nothing: None if an embedded PostgreSQL does not run.

    It is for one short look. It does not keep an embedded server from stopping.
    """
    settings = config.load()
    url, place = _where(database, home, settings)
    if url is None:
        url = running(place)
    if url is None:
        return None
    if is_remote(url):
        return _remote(url, settings, worker=None, pool_size=1)
    return _open(url, None, _check, worker=None, pool_size=1)


def _open(
    database: str | None,
    home: str | Path | None,
    prepare: Callable[[Database, bool], None],
    *,
    worker: str | None,
    pool_size: int = 10,
    statement_timeout: float | None = None,
    listen_url: str | None = None,
    clock: Callable[[], datetime] | None = None,
    share_commits: bool = False,
) -> Custody:
    settings = config.load()
    server: EmbeddedServer | None = None
    url, place = _where(database, home, settings)
    if url is None:
        binaries()  # refused before anything is announced or made
        if place == Path.cwd() / ".custody" and not exists(place):
            logger.warning("a new database is made in %s: there is none here, nor in a directory above", place)
        server = outside(lambda: acquire(place))
        url = server.url
    else:
        _require_database(url)
        listen_url = listen_url or settings.listen_url
    try:
        made = AsyncDatabase if bridged() else Database
        opened = made(url, pool_size=pool_size, statement_timeout=statement_timeout)
        try:
            prepare(opened, server is not None)
        except BaseException:
            opened.close()
            raise
    except BaseException:
        if server is not None:
            outside(server.close)
        raise
    return Custody(
        opened,
        server=server,
        defaults=settings.policy,
        worker=worker,
        clock=clock,
        listen_url=listen_url,
        share_commits=share_commits,
    )


def url_from(parts: Mapping[str, Any]) -> str:
    """A URL of libpq's parameters (`host`, `dbname`, `sslmode`, …). What is none of them is left out."""
    known = {option.keyword.decode() for option in Conninfo.get_defaults()}
    given = {name: str(value) for name, value in parts.items() if name in known}
    return "postgresql:///?" + urlencode(given, quote_via=quote, safe="")


def _require_database(url: str) -> None:
    if not url.startswith(("postgresql://", "postgres://")):
        raise InvalidArgument(f"{url!r} is not the URL of a database", "Give a postgresql:// or http:// URL, or none.")


def _where(database: str | None, home: str | Path | None, settings: config.Config) -> tuple[str | None, Path]:
    """The URL of a database or server, or None; and the home of the embedded database."""
    url = database or (None if home is not None else settings.database)
    return url, settings.home if home is None else Path(home)


def _prepare(db: Database, embedded: bool) -> None:
    with db.connection() as connection:
        found = schema.state(connection)
    if found is None or (embedded and not schema.serves(found)):
        outside(lambda: schema.migrate(db.url))
    _check(db, embedded)


def _check(db: Database, _embedded: bool) -> None:
    db.require(schema.check)


def migrate(database: str, *, wait: Duration = "60s") -> list[int]:
    """Migrates the schema of a database to this version of Custody. Returns the applied versions.

    It may run while programs of the release before use the database. `wait`: how long it tries to get its locks, while
    it lets others go on, before it gives up (`busy`).
    """
    _require_own(database)
    return schema.migrate(database, wait=seconds(wait))


def planned(database: str | None = None, *, home: str | Path | None = None) -> list[Step]:
    """What `migrate` would do now. Changes nothing. Starts an existing embedded PostgreSQL."""
    url, place = _where(database, home, config.load())
    if url is not None:
        _require_own(url)
        return plan(url)
    if not exists(place):
        return []
    with acquire(place) as server:
        return plan(server.url)


def _require_own(url: str) -> None:
    if is_remote(url):
        raise NeedsDatabase(
            "the schema of a server cannot be changed over HTTP", "Give the postgresql:// URL of its database."
        )
    _require_database(url)
