"""A server for tests: an embedded PostgreSQL without durability, and copies of one template database."""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from custody.engine import Custody
from custody.store import databases, embedded, migrate
from custody.store.postgres import Database
from custody.testing.clock import Clock

NOT_DURABLE = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}
ROOM = 2 * 2**30  # bytes of free memory that are needed to put the database there

_numbers = itertools.count()


class TestCustody(Custody):
    """Custody on a database of its own, with a clock that stands still until `clock.move("5s")`."""

    __test__ = False  # not a class of tests, although pytest collects such names

    def __init__(self, db: Database, *, clock: Clock, **settings: Any) -> None:
        super().__init__(db, clock=clock, **settings)
        self.clock = clock


class TestServer:
    """A running server with a template database of Custody's schema, created when it is first needed."""

    __test__ = False

    def __init__(self, url: str) -> None:
        self.url = url
        self._template: str | None = None

    def _template_name(self) -> str:
        if self._template is None:
            name = f"custody_template_{os.getpid()}_{next(_numbers)}"
            migrate.migrate(databases.create(self.url, name))
            self._template = name
        return self._template

    @contextmanager
    def database(self) -> Iterator[str]:
        """The URL of a fresh database with Custody's schema; it is dropped at the end."""
        name = f"custody_test_{os.getpid()}_{next(_numbers)}"
        url = databases.create(self.url, name, template=self._template_name())
        try:
            yield url
        finally:
            databases.drop(self.url, name)

    @contextmanager
    def custody(self, *, clock: Clock | None = None) -> Iterator[TestCustody]:
        """Custody on a fresh database."""
        with self.database() as url, TestCustody(Database(url), clock=clock or Clock(), worker="test") as opened:
            yield opened

    def close(self) -> None:
        if self._template is not None:
            databases.drop(self.url, self._template)
            self._template = None


@contextmanager
def server(url: str | None = None) -> Iterator[TestServer]:
    """A server for tests: that of the URL (whose user must be able to create databases), or an embedded one."""
    if url is not None:
        given = TestServer(url)
        try:
            yield given
        finally:
            given.close()
        return
    home = Path(tempfile.mkdtemp(prefix="custody-testing-", dir=_in_memory()))
    home.chmod(0o711)  # if we are root, the server runs as another user, who must be able to enter
    try:
        with embedded.acquire(home, settings=NOT_DURABLE) as running:
            yield TestServer(running.url)
    finally:
        shutil.rmtree(home, ignore_errors=True)


def _in_memory() -> Path | None:
    """A file system in memory, if there is one with room: copying a database is several times faster there."""
    memory = Path("/dev/shm")
    return memory if os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > ROOM else None
