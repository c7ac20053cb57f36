"""Tests for mutants of the SQL, in one pytest process: one server, and one template in which functions are replaced.

First each test that is not known yet runs once on the unchanged SQL, with `track_functions`, to record which functions
it calls and how long it takes (`.cache/mutants.json`). A mutant then meets only tests that call its function, first
the one that has found it before and those that are most likely to notice it, until one fails or the time is over.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import cache
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
"""`found`, `survived` or `unreached`; the test that failed, and how; seconds."""


class Change(Protocol):
    """A mutant: a function, the kind of what is removed from it, and the statements that do it and undo it."""

    @property
    def name(self) -> str: ...
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
        recorded = json.loads(MAP.read_text(encoding="utf-8")) if MAP.exists() else {"tests": {}, "found": {}}
        self._known = {name: Known(**known) for name, known in recorded["tests"].items()}
        self._found: dict[str, str] = recorded["found"]
        """The test that has found a mutant in an earlier run."""
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
            # what modules hold could be a database from before this mutant
            session._setupstate.teardown_exact(session)  # type: ignore[arg-type]  # it takes any node
            self._wanted = mutant
            self._tell(mutant, self._try(mutant, items))
        return True

    def _run(self, item: pytest.Item) -> str | None:
        """How a test fails, if it does. What its module holds stays until a test of another one runs."""
        item.session._setupstate.teardown_exact(item)
        reports = runtestprotocol(item, log=False, nextitem=item.parent)  # type: ignore[arg-type]  # it takes any node
        return next((_failure(report) for report in reports if report.failed), None)

    def _record(self, session: pytest.Session, items: dict[str, pytest.Item]) -> None:
        unknown = [item for name, item in items.items() if name not in self._known]
        if unknown:
            print(f"recording which functions {len(unknown)} tests call …", flush=True)
        self._tracking = True
        for number, item in enumerate(unknown, 1):
            self._called.clear()
            began = time.monotonic()
            failure = self._run(item)
            session._setupstate.teardown_exact(session)  # type: ignore[arg-type]  # it takes any node
            known = Known(sorted(self._called), round(time.monotonic() - began, 2))
            if failure is not None:
                self.unsound.append(item.nodeid)
                known.functions = []
            self._known[item.nodeid] = known
            if number % 50 == 0 or number == len(unknown):
                print(f"  {number}/{len(unknown)}", flush=True)
                self._write()
        self._tracking = False

    def _write(self) -> None:
        MAP.parent.mkdir(exist_ok=True)
        tests = {name: vars(known) for name, known in self._known.items() if name not in self.unsound}
        MAP.write_text(json.dumps({"tests": tests, "found": self._found}, indent=0), encoding="utf-8")

    def _try(self, mutant: Mutant, items: dict[str, pytest.Item]) -> Verdict:
        chosen = self._tests_of(mutant, items)
        began = time.monotonic()
        for name in chosen:
            if time.monotonic() - began > self._budget:
                break
            failure = self._run(items[name])
            if failure is not None:
                killers = self._killers.setdefault(mutant.function, [])
                if name not in killers:
                    killers.insert(0, name)
                self._found[mutant.name] = name
                self._write()
                return "found", f"{name} ({failure})", time.monotonic() - began
        return "survived" if chosen else "unreached", None, time.monotonic() - began

    def _tests_of(self, mutant: Mutant, items: dict[str, pytest.Item]) -> list[str]:
        """Tests that call the function, or others into which PostgreSQL may have put it."""
        called = {mutant.function}
        while more := set().union(*(self._callers.get(function, ()) for function in called)) - called:
            called |= more
        found = [name for name in items if called & {*self._known[name].functions}]
        steps = set(re.findall(r"custody\.(\w+)\(", mutant.original()))
        killers = self._killers.get(mutant.function, [])
        at_once = mutant.kind in PARALLEL

        def place(name: str) -> tuple[bool, int, bool, bool, int, int, float]:
            known = self._known[name]
            other = name != self._found.get(mutant.name)
            turn = killers.index(name) if name in killers else len(killers)
            interleaved = name.startswith("tests/interleaving")
            indirect = mutant.function not in known.functions and mutant.function not in _source(items[name].path)
            # whoever calls most of what it calls has come furthest in it
            deep = len(steps & {*known.functions})
            return other, turn, indirect, interleaved != at_once, -deep, len(known.functions), known.seconds

        return sorted((name for name in found if not at_once or _concurrent(items[name].path)), key=place)


def _failure(report: pytest.TestReport) -> str:
    """The first words of an error: what a timeout has found is worth a second look on a quiet machine."""
    crash = getattr(report.longrepr, "reprcrash", None)
    return " ".join(str(crash.message if crash else report.longrepr).split())[:80]


@cache
def _source(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _concurrent(path: Path) -> bool:
    return path.parent.name == "interleaving" or any(sign in _source(path) for sign in CONCURRENT)


def _functions_called(url: str) -> list[str]:
    """Of all sessions of a database, which have told when they have ended."""
    with psycopg.connect(url, autocommit=True) as connection:
        end = time.monotonic() + 5
        others = "SELECT FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        while connection.execute(others).fetchone() is not None and time.monotonic() < end:
            time.sleep(0.01)
        rows = connection.execute("SELECT funcname FROM pg_stat_user_functions WHERE schemaname = 'custody'").fetchall()
    return [name for (name,) in rows]


def run(runner: Runner[Any], tests: Sequence[str]) -> int:
    """pytest's exit status."""
    return pytest.main(
        [
            *tests, "-qq", "--no-header", "--no-summary", "-p", "no:cacheprovider", "--timeout", str(LONGEST),
            "-m", "not chaos and not slow and not long and not pooler and not browser",
        ],
        plugins=[runner],
    )  # fmt: skip
