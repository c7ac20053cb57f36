"""Opening Custody: which database, is it there, and does its schema fit."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from custody import config
from custody.engine import Custody
from custody.errors import InvalidArgument
from custody.store import migrate as schema
from custody.store.embedded import EmbeddedServer, acquire
from custody.store.postgres import Database


def connect(
    database: str | None = None,
    *,
    home: str | Path | None = None,
    worker: str | None = None,
    pool_size: int = 10,
    clock: Callable[[], datetime] | None = None,
) -> Custody:
    """Opens Custody: on the `postgresql://` URL given here or by CUSTODY_DATABASE, else embedded in `home`.

    The embedded PostgreSQL (in `./.custody`, or CUSTODY_HOME) is started if it does not run, shared with every other
    process that uses it, and stopped by the last one. Its schema is kept up to date by itself; in a database of your
    own it is created if there is none, and changed only by `custody.migrate`. `clock` replaces the server's clock, for
    tests.
    """
    settings = config.load()
    server: EmbeddedServer | None = None
    url = database or (None if home is not None else settings.database)
    if url is None:
        server = acquire(Path(home) if home is not None else settings.home)
        url = server.url
    elif not url.startswith(("postgresql://", "postgres://")):
        raise InvalidArgument(f"{url!r} is not a database", "Give a URL that begins with postgresql://, or nothing.")
    try:
        opened = Database(url, pool_size=pool_size)
        try:
            _prepare(opened, embedded=server is not None)
        except BaseException:
            opened.close()
            raise
    except BaseException:
        if server is not None:
            server.close()
        raise
    return Custody(opened, server=server, defaults=settings.policy, worker=worker, clock=clock)


def _prepare(db: Database, *, embedded: bool) -> None:
    with db.connection() as connection:
        fresh = schema.state(connection) is None
    if embedded or fresh:
        schema.migrate(db.url)
    with db.connection() as connection:
        schema.check(connection)


def migrate(database: str) -> list[int]:
    """Brings the schema of a database to this version of Custody. Returns the versions that were applied."""
    return schema.migrate(database)


def check_schema(database: str) -> None:
    """Refuses a database that cannot be reached or whose schema is not of this version. Changes nothing."""
    db = Database(database, pool_size=1)
    try:
        with db.connection() as connection:
            schema.check(connection)
    finally:
        db.close()
