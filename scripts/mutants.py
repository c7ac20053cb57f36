"""Remove one fence at a time from the SQL functions, and see whether a test notices.

A fence is a row lock, the order of a lock statement, or a comparison with a lease, a deadline or an epoch. Each mutant
is a copy of the package with one fence removed; the tests of its part run against the copy until one fails. A mutant
that no test notices is a survivor: docs/mutants.toml has to explain it, or a test is missing.

`--list` shows the mutants, `--only lifecycle/settle` chooses by file, `--jobs 2` runs them side by side. The exit
status is 1 if a survivor is not explained.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import psycopg

from custody.store import embedded, migrate

ROOT = Path(__file__).resolve().parent.parent
SQL = Path("src/custody/store/sql")
EXPLAINED = ROOT / "docs/mutants.toml"
TIMEOUT = 900
"""Seconds for the tests of one mutant. A mutant that makes them hang is found, too."""

_LOCK = re.compile(r"\s+FOR (?:NO KEY UPDATE|UPDATE|SHARE)(?: OF \w+)?(?: SKIP LOCKED| NOWAIT)?")
_ORDER = re.compile(r"ORDER BY ([\w.\", ]+?)(?=(?: LIMIT [\w.]+)?\s+FOR (?:NO KEY )?(?:UPDATE|SHARE))")
_OPERAND = r"(?:[\w.\"]+|\(\w+\)\.\w+)(?:\((?:[^()]|\([^()]*\))*\)|\[\w+\])?"
_COMPARISON = re.compile(rf"({_OPERAND}) (=|<>|<|<=|>|>=|IS DISTINCT FROM) ({_OPERAND})")
_FENCES = {
    "lease": re.compile(r"\blease_id\b"),
    "deadline": re.compile(r"deadline|expires_at"),
    "epoch": re.compile(r"epoch"),
}

PARTS = {
    "base": ["tests/integration/test_topics.py"],
    "claim": ["tests/integration/test_claim.py", "tests/integration/test_expiry.py", "tests/property"],
    "lifecycle": [
        *(
            f"tests/integration/test_{noun}.py"
            for noun in ("settle", "expiry", "redrive", "rewind", "replay", "joining")
        ),
        "tests/property",
    ],
    "log": [
        *(f"tests/integration/test_{noun}.py" for noun in ("transactions", "producers", "delays", "publish", "topics")),
        *(f"tests/property/test_{noun}_machine.py" for noun in ("transaction", "log")),
    ],
    "outbox": ["tests/outbox", "tests/outbox_conformance", "tests/property/test_outbox_machine.py"],
    "pipelines": ["tests/integration/test_pipelines.py", "tests/integration/test_dead_letter_pipelines.py"],
    "server": ["tests/integration/test_coalesced.py", "tests/integration/test_apikeys.py"],
    "upkeep": [f"tests/integration/test_{noun}.py" for noun in ("retention", "upkeep", "journal")],
}
"""Tests of each folder of SQL; tests/interleaving runs for all of them."""


@dataclass(frozen=True)
class Mutant:
    path: str
    line: int
    kind: str
    start: int
    end: int
    instead: str
    text: str

    @property
    def name(self) -> str:
        """Stable while lines move: the file, the kind of fence, and the text that was changed."""
        return f"{self.path}: {self.kind}: {self.text}"

    def source(self) -> str:
        """The file without this fence."""
        source = (ROOT / SQL / self.path).read_text(encoding="utf-8")
        return source[: self.start] + self.instead + source[self.end :]


def files() -> list[Path]:
    return sorted(path for path in (ROOT / SQL).rglob("*.sql") if path.parent.name not in ("schema", "insights", "sql"))


def mutants_of(path: Path) -> Iterator[Mutant]:
    source = path.read_text(encoding="utf-8")
    code = re.sub(r"--[^\n]*", lambda comment: " " * len(comment[0]), source)

    def mutant(kind: str, match: re.Match[str], instead: str) -> Mutant:
        line_start = code.rfind("\n", 0, match.start() + len(match[0]) - len(match[0].lstrip())) + 1
        text = " ".join(source[line_start : source.find("\n", match.end())].split())
        line = code.count("\n", 0, line_start) + 1
        return Mutant(str(path.relative_to(ROOT / SQL)), line, kind, match.start(), match.end(), instead, text)

    for match in _LOCK.finditer(code):
        yield mutant("lock", match, "")
    for match in _ORDER.finditer(code):
        yield mutant("order", match, "ORDER BY " + ", ".join(f"{column} DESC" for column in match[1].split(", ")))
    for match in _COMPARISON.finditer(code):
        before = code[code.rfind(";", 0, match.start()) + 1 : match.start()]
        assigned = re.search(r"\bSET (?:(?!\b(?:WHERE|FROM)\b).)*$", before, re.DOTALL)
        if assigned or match[3] in ("ANY", "NULL") or "CREATE VIEW" in before:
            continue
        for kind, fence in _FENCES.items():
            if fence.search(match[1]) or fence.search(match[3]):
                # a condition of IF refuses, so it never holds; a condition of WHERE selects, so it always holds
                yield mutant(kind, match, "false" if re.search(r"\b(IF|ELSIF|WHEN)\b[^\n]*$", before) else "true")
                break


def statement_of(source: str, position: int) -> str:
    """The CREATE FUNCTION around a position, in a form that replaces the function."""
    start = source.rfind("CREATE FUNCTION", 0, position)
    end = re.compile(r"\$\$[^$]*?;").search(source, source.find("$$", start) + 2)
    assert start >= 0
    assert end is not None
    while end.start() < position:
        end = re.compile(r"\$\$[^$]*?;").search(source, end.end())
        assert end is not None
    return source[start : end.end()].replace("CREATE FUNCTION", "CREATE OR REPLACE FUNCTION", 1)


def require_valid(mutants: list[Mutant]) -> None:
    """Creates each mutated function once: a mutant that is no SQL would be found by any test."""
    with tempfile.TemporaryDirectory(prefix="custody-mutants-") as home, embedded.acquire(Path(home)) as server:
        migrate.migrate(server.url)
        for mutant in mutants:
            statement = statement_of(mutant.source(), mutant.start)
            with psycopg.connect(server.url) as connection:
                connection.execute(statement.encode())
                connection.rollback()


def run(mutant: Mutant) -> tuple[str, float]:
    """`found` by a test, or because the tests hang; else `survived`. And how long that took."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="custody-mutant-") as home:
        shutil.copytree(ROOT / "src", Path(home) / "src")
        (Path(home) / SQL / mutant.path).write_text(mutant.source(), encoding="utf-8")
        tests = [*PARTS[mutant.path.partition("/")[0]], "tests/interleaving"]
        environment = {**os.environ, "PYTHONPATH": f"{home}/src", "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not slow and not long"]
        try:
            code = subprocess.run(
                [*command, *tests], cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, timeout=TIMEOUT
            ).returncode
        except subprocess.TimeoutExpired:
            code = 1
    if code not in (0, 1):
        raise SystemExit(f"pytest ended with {code} for {mutant.name}")
    return "found" if code else "survived", time.monotonic() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="show the mutants and run nothing")
    parser.add_argument("--only", default="", help="mutants whose name contains this text")
    parser.add_argument("--jobs", type=int, default=2, help="how many mutants to try at once")
    arguments = parser.parse_args()
    mutants = [mutant for path in files() for mutant in mutants_of(path) if arguments.only in mutant.name]
    if arguments.list:
        for mutant in mutants:
            print(f"{mutant.path}:{mutant.line} {mutant.kind}: {mutant.text}")
        print(f"{len(mutants)} mutants")
        return 0
    require_valid(mutants)
    explained = tomllib.loads(EXPLAINED.read_text(encoding="utf-8")) if EXPLAINED.exists() else {}
    survivors = []
    with ThreadPoolExecutor(arguments.jobs) as pool:
        running = {pool.submit(run, mutant): mutant for mutant in mutants}
        for number, future in enumerate(as_completed(running), 1):
            mutant, (verdict, took) = running[future], future.result()
            print(f"{number}/{len(mutants)} {verdict} in {took:.0f} s: {mutant.name}", flush=True)
            if verdict == "survived":
                survivors.append(mutant)
    unexplained = [mutant for mutant in survivors if mutant.name not in explained]
    print(f"{len(mutants) - len(survivors)} of {len(mutants)} found, {len(survivors) - len(unexplained)} explained")
    for mutant in unexplained:
        print(f"not explained: {mutant.path}:{mutant.line} {mutant.kind}: {mutant.text}")
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
