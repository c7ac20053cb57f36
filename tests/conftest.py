"""A real PostgreSQL for every test: one server for each test process, and a database that is as new for each test."""

from __future__ import annotations

import gc
import itertools
import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest
from psycopg import sql
from tests import jvm
from tests.databases import Copy, Kept, in_memory, url_of

import custody
from custody.store import embedded, migrate

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from xdist.remote import Producer
    from xdist.scheduler import Scheduling

TEMPLATE = "custody_template"
_numbers = itertools.count()
FIRST = ("spark", "docs", "chaos", "property", "cli", "worker", "http", "integration", "outbox")
"""Folders of files that take long: what is short comes last, so that no process is left alone with a long one."""
OWN = ("spark", "chaos", "pooler", "browser")
"""Folders whose tests leave processes behind that know a database by its name."""
OF_SPARK = re.compile(r"\bspark: SparkSession\b")
"""In files with tests of the session that the tests of a process share."""
ARCHIVE = pytest.StashKey[Path]()
"""Where the classes for JVMs are to be found, while they are not used yet."""


def pytest_configure() -> None:
    gc.disable()  # until all tests are collected: they stay, and so does what they import
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as a shell does for what it runs in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    jvm.quicken()


@pytest.hookimpl(tryfirst=True)  # before -m picks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name == "chaos":
            item.add_marker("chaos")
        if item.path.parent.name in OWN:
            item.add_marker("own_database")
    place = {folder: number for number, folder in enumerate(FIRST)}
    items.sort(key=lambda item: place.get(item.path.parent.name, len(FIRST)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduling | None:
    """With `--dist loadgroup` each file goes to one process, and all files of the shared Spark go to the same one.

    A JVM that starts, and compiles what it runs for the first time, costs more than most of these files.
    """
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Files(LoadFileScheduling):  # type: ignore[misc]  # untyped
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::", 1)[0]
            return "spark" if file in shared else file

    tests = Path(__file__).parent
    found = [file for file in tests.rglob("test_*.py") if OF_SPARK.search(file.read_text("utf-8"))]
    shared = {file.relative_to(config.rootpath).as_posix() for file in found}
    return Files(config, log)


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.collect()
    gc.freeze()  # thousands of tests and all that they import stay to the end: do not look through them again
    gc.enable()
    with_spark = [item for item in session.items if item.path.parent.name == "spark"]
    if session.config.option.collectonly or not with_spark:
        return
    archive = jvm.archive_in(session.config.cache.mkdir("jvm"))
    processes = sum(any(item.iter_markers(mark)) for item in with_spark for mark in ("chaos", "slow", "long"))
    if archive is not None and (archive.exists() or processes >= jvm.PAYS):
        session.config.stash[ARCHIVE] = archive


def pytest_runtest_setup(item: pytest.Item) -> None:
    """The first process to come here makes the archive; the others go on, and use it when it is there."""
    archive = item.config.stash.get(ARCHIVE, None)
    if archive is None:
        return
    if not archive.exists():
        try:
            jvm.make(archive)
        except BaseException:
            del item.config.stash[ARCHIVE]  # it fails one test and not all
            raise
    if archive.exists():
        jvm.quicken(archive)
        del item.config.stash[ARCHIVE]


@pytest.fixture(scope="session")
def server_url() -> Iterator[str]:
    """The server of this test process: the one that CUSTODY_TEST_DATABASE names, or an embedded one of its own."""
    given = os.environ.get("CUSTODY_TEST_DATABASE")
    if given:
        yield given
        return
    # durability is tested where it matters, with a server of the test's own; here it would only cost time
    settings = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}
    settings["autovacuum_naptime"] = "1d"  # its statistics would make the kept database differ from its template
    with in_memory("custody-tests-") as home, embedded.acquire(home, settings=settings) as server:
        yield server.url


@pytest.fixture
def base() -> Iterator[Path]:
    """A directory of mode 0700 for homes of the test's own; no server of a home inside it outlives the test."""
    with in_memory("custody-base-") as directory:
        yield directory
        for data_dir in directory.glob("**/data"):
            embedded.stop(data_dir.parent, "immediate")


def _execute(url: str, *statements: sql.Composed) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement)


@pytest.fixture(scope="session")
def template(server_url: str) -> str:
    name = f"{TEMPLATE}_{os.getpid()}"
    _execute(server_url, sql.SQL("DROP DATABASE IF EXISTS {}").format(sql.Identifier(name)))
    _execute(server_url, sql.SQL("CREATE DATABASE {} STRATEGY FILE_COPY").format(sql.Identifier(name)))
    migrate.migrate(url_of(server_url, name))
    return name


@pytest.fixture(scope="session")
def kept_database(server_url: str, template: str) -> Iterator[Kept]:
    with closing(Kept(server_url, template)) as made:
        yield made


@pytest.fixture
def database(request: pytest.FixtureRequest, server_url: str, template: str) -> Iterator[Kept | Copy]:
    """A database with Custody's schema, as new: the kept one, or with the mark `own_database` a copy."""
    if request.node.get_closest_marker("own_database"):
        with closing(Copy(server_url, template)) as copy:
            yield copy
        return
    kept: Kept = request.getfixturevalue("kept_database")
    yield kept
    kept.recycle()


@pytest.fixture
def bare_url(server_url: str) -> Iterator[str]:
    """A database without anything of Custody."""
    with closing(Copy(server_url)) as copy:
        yield copy.url


@pytest.fixture
def database_url(database: Kept | Copy) -> str:
    return database.url


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.time = datetime(2030, 1, 1, tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.time

    def move(self, seconds: float) -> None:
        self.time += timedelta(seconds=seconds)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def c(database: Kept | Copy, clock: Clock) -> Iterator[custody.Custody]:
    """Custody on a fresh database, with a clock that the test moves."""
    with database.custody(worker="test", clock=clock) as opened:
        yield opened


@pytest.fixture
def db(database_url: str) -> Iterator[psycopg.Connection]:
    """A plain connection to the same database."""
    with psycopg.connect(database_url, autocommit=True) as connection:
        yield connection


@pytest.fixture
def commits(c: custody.Custody, db: psycopg.Connection) -> Callable[[], int]:
    """In how many transactions messages were written to the log (xmin would tell of subtransactions)."""
    db.execute("CREATE TABLE seen (xid xid8 PRIMARY KEY)")
    db.execute(
        "CREATE FUNCTION see() RETURNS trigger LANGUAGE plpgsql AS "
        "'BEGIN INSERT INTO seen VALUES (pg_current_xact_id()) ON CONFLICT DO NOTHING; RETURN NEW; END'"
    )
    db.execute("CREATE TRIGGER see AFTER INSERT ON custody.log FOR EACH ROW EXECUTE FUNCTION see()")
    return lambda: db.execute("SELECT count(*) FROM seen").fetchone()[0]


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """The one Spark of this test process."""
    from tests.spark.local import local_spark  # most processes that run tests have no need for it

    with local_spark() as opened:
        yield opened
