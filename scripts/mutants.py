"""Remove one fence at a time from the SQL functions, and see whether a test notices.

A fence is a row or advisory lock, the order of a lock statement, or a comparison with a lease, a deadline or an epoch.
Each mutant is one function without one fence: it replaces the function in the database from which those of the tests
are copied, and the tests that call the function run until one fails (scripts/mutant_tests.py). A mutant that no test
notices is a survivor: docs/mutants.toml has to explain it, or a test is missing.

`--list` shows the mutants, `--only lifecycle/settle` chooses by file, function or text, `--tests tests/interleaving` by
tests. What is explained is not tried again, except with `--explained`. The exit status is 1 if a survivor is not
explained.
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import mutant_tests
import psycopg

from custody.store import embedded, migrate

ROOT = Path(__file__).resolve().parent.parent
SQL = Path("src/custody/store/sql")
EXPLAINED = ROOT / "docs/mutants.toml"

_FUNCTION = re.compile(r"^CREATE FUNCTION custody\.(\w+)\(.*?\$\$.*?\$\$[^$;]*;", re.DOTALL | re.MULTILINE)
_LOCK = re.compile(r"\s+FOR (?:NO KEY UPDATE|UPDATE|SHARE)(?: OF \w+)?(?: SKIP LOCKED| NOWAIT)?")
_ADVISORY = re.compile(r"PERFORM pg_advisory_xact_lock\([^;]*\)(?=;)")
_ORDER = re.compile(r"ORDER BY ([\w.\",\s]+?)(?=(?: LIMIT [\w.]+)?\s+FOR (?:NO KEY )?(?:UPDATE|SHARE))")
_OPERAND = r"(?:[\w.\"]+|\(\w+\)\.\w+)(?:\((?:[^()]|\([^()]*\))*\)|\[\w+\])?"
_COMPARISON = re.compile(rf"({_OPERAND}) (=|<>|<|<=|>|>=|IS DISTINCT FROM) ({_OPERAND})")
_TABLE = re.compile(r"(?:UPDATE|DELETE FROM|FROM|JOIN) custody\.\w+")
_FENCES = {
    "lease": re.compile(r"\b(lease_id|probe_lease|claimed_by)\b"),
    "deadline": re.compile(r"deadline|expires_at"),
    "epoch": re.compile(r"epoch"),
}


@dataclass(frozen=True)
class Mutant:
    path: str
    line: int
    function: str
    kind: str
    text: str
    number: int
    """Among the same fences of the function."""
    statement: str
    """What creates the function."""
    start: int
    end: int
    instead: str

    @property
    def name(self) -> str:
        """Stable while lines and files move: the function, the kind of fence, its table and its text."""
        return f"{self.function}: {self.kind}: {self.text}" + (f" #{self.number}" if self.number > 1 else "")

    def original(self) -> str:
        return self.statement.replace("CREATE FUNCTION", "CREATE OR REPLACE FUNCTION", 1)

    def mutated(self) -> str:
        without = self.statement[: self.start] + self.instead + self.statement[self.end :]
        return without.replace("CREATE FUNCTION", "CREATE OR REPLACE FUNCTION", 1)


def files() -> list[Path]:
    """Those with verbs; what only shows something has no fences."""
    return sorted(path for path in (ROOT / SQL).rglob("*.sql") if path.parent.name not in ("schema", "insights"))


def functions_of(source: str) -> Iterator[tuple[str, int, str]]:
    """The name, the place and the statement of each function."""
    for match in _FUNCTION.finditer(source):
        yield match[1], match.start(), match[0]


def callers() -> dict[str, set[str]]:
    """Which functions name a function in SQL, which PostgreSQL may put into them: then it counts no calls. If none
    does, the others of its folder: whoever calls those may call it, too."""
    bodies: dict[str, str] = {}
    folders: dict[Path, set[str]] = {}
    for path in files():
        for name, _, statement in functions_of(path.read_text(encoding="utf-8")):
            bodies[name] = statement
            folders.setdefault(path.parent, set()).add(name)
    found: dict[str, set[str]] = {}
    for folder in folders.values():
        for name in folder:
            if re.search(r"LANGUAGE sql\b", bodies[name]):
                named = re.compile(rf"custody\.{name}\(")
                using = {caller for caller, body in bodies.items() if caller != name and named.search(body)}
                found[name] = using or folder - {name}
    return found


def mutants_of(path: Path) -> Iterator[Mutant]:
    source = path.read_text(encoding="utf-8")
    for function, place, statement in functions_of(source):
        seen: Counter[tuple[str, str]] = Counter()
        for kind, start, end, instead, text in fences_of(statement):
            seen[kind, text] += 1
            line = source.count("\n", 0, place + start) + 1
            name = str(path.relative_to(ROOT / SQL))
            yield Mutant(name, line, function, kind, text, seen[kind, text], statement, start, end, instead)


def fences_of(statement: str) -> Iterator[tuple[str, int, int, str, str]]:
    """The kind and the place of each fence, what stands there without it, and its table and text."""
    code = re.sub(r"--[^\n]*", lambda comment: " " * len(comment[0]), statement)

    def fence(kind: str, match: re.Match[str], instead: str) -> tuple[str, int, int, str, str]:
        before = code[code.rfind(";", 0, match.start()) + 1 : match.start()]
        tables = _TABLE.findall(before)
        return kind, match.start(), match.end(), instead, " ".join(f"{tables[-1] if tables else ''} {match[0]}".split())

    for match in _LOCK.finditer(code):
        yield fence("lock", match, "")
    for match in _ADVISORY.finditer(code):
        yield fence("lock", match, "NULL")
    for match in _ORDER.finditer(code):
        yield fence("order", match, "ORDER BY " + ", ".join(f"{column.strip()} DESC" for column in match[1].split(",")))
    for match in _COMPARISON.finditer(code):
        before = code[code.rfind(";", 0, match.start()) + 1 : match.start()]
        assigned = re.search(r"\bSET (?:(?!\b(?:WHERE|FROM)\b).)*$", before, re.DOTALL)
        if assigned or match[3] in ("ANY", "NULL"):
            continue
        for kind, name in _FENCES.items():
            if name.search(match[1]) or name.search(match[3]):
                yield fence(kind, match, "false" if refuses(match, name, before) else "true")
                break


def refuses(match: re.Match[str], name: re.Pattern[str], before: str) -> bool:
    """Whether a comparison holds for those who are refused: it then never holds, and others always do. A condition of
    WHERE selects; a condition of IF does so, too, for the lease that is meant and for a deadline that is not over."""
    if not re.search(r"\b(IF|ELSIF|WHEN)\b[^\n]*$", before):
        return False
    granting = ("=", ">", ">=") if name.search(match[1]) else ("=", "<", "<=")
    return match[2] not in granting


def require_valid(mutants: list[Mutant]) -> None:
    """Creates each mutated function once: a mutant that is no SQL would be found by any test."""
    with tempfile.TemporaryDirectory(prefix="custody-mutants-") as home, embedded.acquire(Path(home)) as server:
        migrate.migrate(server.url)
        for mutant in mutants:
            with psycopg.connect(server.url) as connection:
                connection.execute(mutant.mutated().encode())
                connection.rollback()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="show the mutants and run nothing")
    parser.add_argument("--only", default="", help="mutants whose file or name contains this text")
    parser.add_argument("--tests", nargs="+", default=mutant_tests.TESTS, help="the tests that have to notice them")
    parser.add_argument("--explained", action="store_true", help="try those of docs/mutants.toml, too")
    parser.add_argument("--budget", type=float, default=120, help="seconds of tests for one mutant")
    arguments = parser.parse_args()
    mutants = [
        mutant
        for path in files()
        for mutant in mutants_of(path)
        if arguments.only in mutant.path or arguments.only in mutant.name
    ]
    if arguments.list:
        for mutant in mutants:
            print(f"{mutant.path}:{mutant.line} {mutant.name}")
        print(f"{len(mutants)} mutants")
        return 0
    explained = tomllib.loads(EXPLAINED.read_text(encoding="utf-8"))
    tried = [mutant for mutant in mutants if arguments.explained or mutant.name not in explained]
    require_valid(tried)
    survivors: list[Mutant] = []
    numbers = itertools.count(1)

    def tell(mutant: Mutant, verdict: mutant_tests.Verdict) -> None:
        what, test, took = verdict
        by = f" by {test}" if test else ""
        print(f"{next(numbers)}/{len(tried)} {what}{by} in {took:.1f} s: {mutant.name}", flush=True)
        if what != "found":
            survivors.append(mutant)

    runner = mutant_tests.Runner(tried, callers(), arguments.budget, tell)
    status = mutant_tests.run(runner, arguments.tests)
    if status != 0:
        print(f"pytest ended with {status}", file=sys.stderr)
        return 2
    for test in runner.unsound:
        print(f"fails without any mutant, and was left out: {test}")
    rest = [mutant for mutant in survivors if mutant.name not in explained]
    found = len(tried) - len(survivors)
    known = len(mutants) - found - len(rest)
    print(f"{found} of {len(mutants)} found, {known} explained, rest: {len(rest)}")
    for mutant in rest:
        print(f"  {mutant.path}:{mutant.line} {mutant.name}")
    return 1 if rest else 0


if __name__ == "__main__":
    sys.exit(main())
