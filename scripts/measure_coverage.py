"""Run tests with coverage.py, and show for each folder how much of src/custody they execute.

Arguments are handed on to pytest: paths choose a part of the suite, and without any it is all that CI runs. Processes
that tests start are measured too, unless they are killed. `--publish` writes the table into docs/coverage.md.
The exit status is that of pytest.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / ".cache/coverage"
"""Where the processes leave what they have measured: `data_file` of pyproject.toml."""
PAGE = ROOT / "docs/coverage.md"
SUITE = "not slow and not long and not pooler and not browser"

PROSE = """\
# Test coverage

How much of `src/custody` the tests execute, written by `make coverage ARGS=--publish`. It shows what no test runs, not
what the tests prove: [requirements.md](requirements.md) lists that, and `make mutants` removes what guards the SQL. SQL
functions are not counted here, and neither is what runs in processes that tests kill.

Measured on {date}: {tests} ({outcome}).

"""


def coverage(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A command of coverage.py that has to succeed."""
    return subprocess.run(
        [sys.executable, "-m", "coverage", *arguments], cwd=ROOT, check=True, text=True, capture_output=True
    )


def run(workers: str, arguments: list[str]) -> int:
    """Runs the tests; what was measured before is removed."""
    shutil.rmtree(DATA, ignore_errors=True)
    DATA.mkdir(parents=True)
    pytest = ["pytest", "-q", "-n", workers, "--dist", "loadfile", "--no-loadscope-reorder", "-m", SUITE]
    return subprocess.run([sys.executable, "-m", "coverage", "run", "-m", *pytest, *arguments], cwd=ROOT).returncode


def measured() -> dict[str, Any]:
    """The report of all processes together."""
    coverage("combine")
    report = DATA / "report.json"
    coverage("json", "-o", str(report))
    found: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
    return found


def folder_of(path: str) -> str:
    """The package of a file, or `custody` for what is at its top."""
    parts = Path(path).relative_to("src/custody").parts
    return "custody" if len(parts) == 1 else f"custody/{parts[0]}"


def table(report: dict[str, Any]) -> str:
    folders: dict[str, Counter[str]] = {}
    for path, file in report["files"].items():
        for folder in (folder_of(path), "all"):
            folders.setdefault(folder, Counter()).update(
                {name: number for name, number in file["summary"].items() if isinstance(number, int)}
            )
    lines = ["| folder | statements | lines | branches |", "| --- | ---: | ---: | ---: |"]
    for folder, sums in sorted(folders.items(), key=lambda item: (item[0] == "all", item[0])):
        rows = percent(sums["covered_lines"], sums["num_statements"])
        branches = percent(sums["covered_branches"], sums["num_branches"])
        lines.append(f"| {folder} | {sums['num_statements']:,} | {rows} | {branches} |")
    return "\n".join(lines) + "\n"


def percent(part: int, whole: int) -> str:
    """Rounded down: 100 % means all."""
    return f"{part * 1000 // whole / 10:.1f} %" if whole else "–"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--publish", action="store_true", help="write the table into docs/coverage.md")
    parser.add_argument("--workers", default="2", help="processes that run tests")
    arguments, rest = parser.parse_known_args()
    status = run(arguments.workers, rest)
    if status not in (0, 1):
        print(f"pytest ended with {status}: nothing was measured", file=sys.stderr)
        return status
    shown = table(measured())
    print(shown)
    if arguments.publish:
        outcome = "all passed" if status == 0 else "some failed"
        chosen = [f"`{path}`" for path in rest if (ROOT / path.partition("::")[0]).exists()]
        tests = ", ".join(chosen) or "all tests that CI runs on the embedded PostgreSQL"
        page = PROSE.format(date=f"{datetime.now(UTC):%Y-%m-%d}", tests=tests, outcome=outcome) + shown
        PAGE.write_text(page, encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main())
