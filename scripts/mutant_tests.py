"""Tests for mutants of the SQL, in one pytest process: one server, and one template in which functions are replaced.

First each test that is not known yet runs once on the unchanged SQL, with `track_functions`, to record which functions
it calls and how long it takes (`.cache/mutants.json`). A mutant then meets only tests that call its function, first
those that are most likely to notice it, until one fails or the time is over.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import psycopg
import pytest
from _pytest.runner import runtestprotocol

ROOT = Path(__file__).resolve().parent.parent
MAP = ROOT / ".cache/mutants.json"
TESTS = [f"tests/{folder}" for folder in ("interleaving", "integration", "property", "outbox")]
LONGEST = 60
"""Seconds for one test: a mutant that makes it hang is found."""
CONCURRENT = ("threading", "ThreadPoolExecutor", "tests.interleaving")
"""What a file of tests has if they do things at once; others cannot miss a lock."""
PARALLEL = {"lock", "order"}

Verdict = tuple[str, str | None, float]
"""`found`, `survived` or `unreached`; the test that failed; seconds."""


class Change(Protocol):
    """A mutant: a function, the kind of what is removed from it, and the statements that do it and undo it."""

    @property
    def function(self) -> str: ...
    @property
    def kind(self) -> str: ...
    def mutated(self) -> str: ...
    def original(self) -> str: ...


Mutant = TypeVar("Mutant", bound=Change)


@dataclass
class Known:
    """What is recorded of a test."""

    functions: list[str] = field(default_factory=list)
    seconds: float = 0.0


class Runner(Generic[Mutant]):
    """The pytest plugin. It replaces the loop over the tests, and the template before a database is copied from it."""

    def __init__(
        self,
        mutants: Sequence[Mutant],
        callers: dict[str, set[str]],
        budget: float,
        tell: Callable[[Mutant, Verdict], None],
    ) -> None:
        self._mutants, self._callers, self._budget, self._tell = mutants, callers, budget, tell
        self._known = {name: Known(**known) for name, known in _read_map().items()}
        self._wanted: Mutant | None = None
        self._applied: Mutant | None = None
        self._set_up = self._tracking = False
        self._called: set[str] = set()
        self._killers: dict[str, list[str]] = {}
        """Tests that have found mutants of a function: they go first."""
        self.unsound: list[str] = []
        """Tests that fail without any mutant: they say nothing."""

    def pytest_configure(self) -> None:
        from hypothesis import Phase, settings  # its plugin wants to be the first to import it

        # a failure is enough: nobody reads the smallest example
        settings.register_profile("mutants", phases=[Phase.explicit, Phase.generate], database=None)
        settings.load_profile("mutants")

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            item.add_marker("own_database")  # a copy of the template as it is then

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: pytest.FixtureRequest) -> Generator[None, Any, Any]:
        if fixturedef.argname != "database":
            return (yield)
        self._prepare(request.getfixturevalue("server_url"), request.getfixturevalue("template"))
        database = yield
        if self._tracking:
            request.addfinalizer(lambda: self._called.update(_functions_called(database.url)))  # before it is dropped
        return database

    def _prepare(self, server_url: str, template: str) -> None:
        """Brings the template into the state that is wanted."""
        if not self._set_up:
            self._set_up = True
            with psycopg.connect(server_url, autocommit=True) as server:
                server.execute("ALTER SYSTEM SET track_functions = 'all'")
                # a thread that waits for a mutant in an endless loop cannot be interrupted from within Python
                server.execute("ALTER SYSTEM SET statement_timeout = '20s'")
                server.execute("SELECT pg_reload_conf()")
        if self._applied is self._wanted:
            return
        with psycopg.connect(server_url, dbname=template, autocommit=True) as database:
            if self._applied is not None:
                database.execute(self._applied.original().encode())
            if self._wanted is not None:
                database.execute(self._wanted.mutated().encode())
        self._applied = self._wanted

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        self._record(session, items)
        for mutant in self._mutants:
            self._leave(session)
            self._wanted = mutant
            self._tell(mutant, self._try(mutant, items))
        return True

    def _leave(self, session: pytest.Session) -> None:
        """Ends what modules hold: it could be a database from before the next mutant."""
        stack = session._setupstate.stack
        module = next((node for node in stack if isinstance(node, pytest.Module)), None)
        other = next((item for item in session.items if module not in item.listchain()), None)
        if module is not None and other is not None:
            session._setupstate.teardown_exact(other)

    def _run(self, item: pytest.Item) -> bool:
        """Whether a test fails. What the one before has left and this one does not need ends first."""
        item.session._setupstate.teardown_exact(item)
        reports = runtestprotocol(item, log=False, nextitem=item)
        return any(report.failed for report in reports)

    def _record(self, session: pytest.Session, items: dict[str, pytest.Item]) -> None:
        unknown = [item for name, item in items.items() if name not in self._known]
        if unknown:
            print(f"recording which functions {len(unknown)} tests call …", flush=True)
        self._tracking = True
        for number, item in enumerate(unknown, 1):
            self._called.clear()
            began = time.monotonic()
            failed = self._run(item)
            item.session._setupstate.teardown_exact(_elsewhere(session, item))
            known = Known(sorted(self._called), round(time.monotonic() - began, 2))
            if failed:
                self.unsound.append(item.nodeid)
                known.functions = []
            self._known[item.nodeid] = known
            if number % 50 == 0 or number == len(unknown):
                print(f"  {number}/{len(unknown)}", flush=True)
                _write_map({name: known for name, known in self._known.items() if name not in self.unsound})
        self._tracking = False

    def _try(self, mutant: Mutant, items: dict[str, pytest.Item]) -> Verdict:
        chosen = self._tests_of(mutant, items)
        began = time.monotonic()
        for name in chosen:
            if time.monotonic() - began > self._budget:
                break
            if self._run(items[name]):
                killers = self._killers.setdefault(mutant.function, [])
                if name not in killers:
                    killers.insert(0, name)
                return "found", name, time.monotonic() - began
        return "survived" if chosen else "unreached", None, time.monotonic() - began

    def _tests_of(self, mutant: Mutant, items: dict[str, pytest.Item]) -> list[str]:
        """Tests that call the function, or, if PostgreSQL has put it into its callers, those that call these."""
        called = {mutant.function}
        while not (found := [name for name in items if called & {*self._known[name].functions}]):
            more = called.union(*(self._callers.get(function, set()) for function in called))
            if more == called:
                return []
            called = more
        killers = self._killers.get(mutant.function, [])
        at_once = mutant.kind in PARALLEL

        def place(name: str) -> tuple[int, bool, int, float]:
            known = self._known[name]
            turn = killers.index(name) if name in killers else len(killers)
            interleaved = name.startswith("tests/interleaving")
            return turn, interleaved != at_once, len(known.functions), known.seconds

        return sorted((name for name in found if not at_once or _concurrent(items[name].path)), key=place)


def _concurrent(path: Path) -> bool:
    source = path.read_text(encoding="utf-8")
    return path.parent.name == "interleaving" or any(sign in source for sign in CONCURRENT)


def _elsewhere(session: pytest.Session, item: pytest.Item) -> pytest.Item:
    """A test of another file; for this one, everything that the file holds ends."""
    return next((other for other in session.items if other.path != item.path), item)


def _functions_called(url: str) -> list[str]:
    """Of all sessions of a database, which have told when they have ended."""
    with psycopg.connect(url, autocommit=True) as connection:
        end = time.monotonic() + 5
        others = "SELECT FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        while connection.execute(others).fetchone() is not None and time.monotonic() < end:
            time.sleep(0.01)
        rows = connection.execute("SELECT funcname FROM pg_stat_user_functions WHERE schemaname = 'custody'").fetchall()
    return [name for (name,) in rows]


def _read_map() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(MAP.read_text(encoding="utf-8")) if MAP.exists() else {}
    return found


def _write_map(known: dict[str, Known]) -> None:
    MAP.parent.mkdir(exist_ok=True)
    MAP.write_text(json.dumps({name: vars(one) for name, one in known.items()}, indent=0), encoding="utf-8")


def run(runner: Runner[Any], tests: Sequence[str]) -> int:
    """pytest's exit status."""
    return pytest.main(
        [
            *tests, "-qq", "--no-header", "--no-summary", "-p", "no:cacheprovider", "--timeout", str(LONGEST),
            "-m", "not chaos and not slow and not long and not pooler",
        ],
        plugins=[runner],
    )  # fmt: skip
