"""Releases made for tests: copies of the package with the changes that a next release and the one after it could make.

Release 2 has a migration, a function with another name and parameter, inner functions with other names, and the former
function for code of release 1. Release 3 no longer works beside release 1.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import custody

PACKAGE = Path(custody.__file__).parent
PLACE = Path("store/sql")

COLOUR = """-- Topics have a colour.
-- locks: topics ACCESS EXCLUSIVE
-- takes: instant
ALTER TABLE custody.topics ADD COLUMN colour text;
"""
BY_WORKER = """-- Cases are found by their worker.
-- locks: cases SHARE
-- takes: scans
-- before: CREATE INDEX CONCURRENTLY IF NOT EXISTS cases_by_worker ON custody.cases (worker);
CREATE INDEX IF NOT EXISTS cases_by_worker ON custody.cases (worker);
"""
LONG = """-- The size of a lease may be more than an int.
-- locks: leases ACCESS EXCLUSIVE
-- takes: rewrites
ALTER TABLE custody.leases ALTER COLUMN settled TYPE bigint;
"""
FORMER = """-- Its name and parameters are others now.
CREATE FUNCTION custody.ack_lease(
    p_lease_id uuid, p_worker text DEFAULT NULL, p_now timestamptz DEFAULT NULL, p_exact boolean DEFAULT false
) RETURNS custody.settled
LANGUAGE sql AS $$
    SELECT f.* FROM custody.finish_lease(p_lease_id, p_exact, p_worker => p_worker, p_now => p_now) f
$$;
"""


def environment(package: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("CUSTODY_")}
    return kept | {"PYTHONPATH": f"{package}{os.pathsep}{Path.cwd()}"}


def program(package: Path, text: str, *arguments: str) -> list[str]:
    """Runs a program with a release of Custody; the lines that it printed."""
    command = [sys.executable, "-c", text, *arguments]
    done = subprocess.run(command, env=environment(package), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def second(directory: Path, url: str) -> Path:
    """The next release. The database is of the present one."""
    made = _copied(directory)
    _release(made, 2, oldest=1)
    (made / "custody" / PLACE / "interfaces" / "1.json").write_text(described(PACKAGE.parent, url))
    _migration(made, 2, "colour", COLOUR)
    _migration(made, 3, "by_worker", BY_WORKER)
    (made / "custody" / PLACE / "former" / "1_ack_lease.sql").write_text(FORMER)

    def sql(text: str) -> str:
        text = text.replace(
            "custody.ack_lease(\n    p_lease_id uuid, p_worker text DEFAULT NULL, p_now timestamptz DEFAULT NULL, "
            "p_exact boolean DEFAULT false",
            "custody.finish_lease(\n    p_lease_id uuid, p_exact boolean DEFAULT false, p_note text DEFAULT NULL, "
            "p_worker text DEFAULT NULL,\n    p_now timestamptz DEFAULT NULL",
        )
        text = re.sub(
            r"custody\.ack_lease\((\S+), (\S+), p_now\)",
            r"custody.finish_lease(\1, p_worker => \2, p_now => p_now)",
            text,
        )
        return re.sub(r"custody\.(claim_partition|lock_to_append|require_partition)\(", r"custody.own_\1(", text)

    for path in (made / "custody" / PLACE).rglob("*.sql"):
        if path.parent.name not in ("schema", "migrations", "former"):
            _edit(path, sql)
    last = "created_at       timestamptz NOT NULL"
    _edit(made / "custody" / PLACE / "schema/log.sql", lambda text: text.replace(last, f"{last},\n    colour text", 1))
    _edit(
        made / "custody/verbs/settle.py",
        lambda text: text.replace('"ack_lease"', '"finish_lease" if self.db.has("finish_lease") else "ack_lease"'),
    )
    return made


def third(directory: Path, before: Path, url: str) -> Path:
    """The release after the next, which is in `before`. The database is of that one."""
    made = _copied(directory, before)
    _release(made, 3, oldest=2)
    place = made / "custody" / PLACE
    (place / "interfaces" / "1.json").unlink()
    (place / "interfaces" / "2.json").write_text(described(before, url))
    (place / "former" / "1_ack_lease.sql").unlink()
    _migration(made, 4, "long", LONG)
    return made


def described(package: Path, url: str) -> str:
    """What the code of a release calls."""
    text = (
        "import sys, psycopg\nfrom custody.store.interfaces import described\nfrom custody.store.roles import entries\n"
        "with psycopg.connect(sys.argv[1]) as connection:\n    print(described(connection, entries()), end='')"
    )
    return "\n".join(program(package, text, url)) + "\n"


def _copied(directory: Path, package: Path = PACKAGE.parent) -> Path:
    shutil.copytree(package / "custody", directory / "custody", ignore=shutil.ignore_patterns("__pycache__"))
    return directory


def _release(made: Path, release: int, *, oldest: int) -> None:
    def raised(text: str) -> str:
        text = re.sub(r"^RELEASE = \d+", f"RELEASE = {release}", text, flags=re.MULTILINE)
        return re.sub(r"^OLDEST = \d+", f"OLDEST = {oldest}", text, flags=re.MULTILINE)

    _edit(made / "custody/store/functions.py", raised)


def _migration(made: Path, version: int, name: str, text: str) -> None:
    (made / "custody" / PLACE / "migrations" / f"{version:04}_{name}.sql").write_text(text)


def _edit(path: Path, change: Callable[[str], str]) -> None:
    path.write_text(change(path.read_text("utf-8")), "utf-8")
