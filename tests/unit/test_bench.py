"""The benchmark runs: its figures are not judged here, for a timed test tells more of the machine than of the code."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from bench import console, markdown
from bench.__main__ import main
from bench.measure import Samples, in_turn, ratio
from bench.report import Row, at_least, at_most
from rich.console import Console

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "bench", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )


@pytest.mark.parametrize(
    "rows",
    [
        ["publishing"],
        pytest.param(["publishing", "consuming", "ordering", "contention", "footprint"], marks=[pytest.mark.chaos]),
    ],
    ids=["some", "more"],
)
def test_rows_are_measured_and_written_as_json(server_url: str, tmp_path: Path, rows: list[str]) -> None:
    found = tmp_path / "found.json"
    done = run("--tiny", *(f"--only={name}" for name in rows), f"--json={found}", f"--url={server_url}")
    assert done.returncode == 0, done.stderr
    report = json.loads(found.read_text())
    assert "PostgreSQL" in report["facts"]["postgresql"]
    names = [row["what"] for row in report["rows"]]
    assert len(names) == len(set(names)), "every row has a name of its own"
    assert all(row["measured"] > 0 for row in report["rows"])
    assert "publish, batch 1,000" in done.stdout


def test_an_unknown_row_is_refused_with_the_list_of_rows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", "--only=nothing"])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "held-xmin" in capsys.readouterr().err


ROWS = [
    Row(what="alone", measured=1500, unit="msg/s", target=at_least(1000)),
    Row(what="publish", measured=300, unit="msg/s", beside="a peer", other=100, ratio=3),
    Row(what="publish", measured=300, unit="msg/s", beside="another", note="not installed: apt-get install it"),
    Row(what="consume", measured=200, unit="msg/s", beside="a peer", other=8000, ratio=0.025),
    Row(what="consume", measured=200, unit="msg/s", beside="another", note="not installed: apt-get install it"),
]


def test_figures_are_written_between_the_marks_of_a_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# Before\n{markdown.BEGIN}of an older run\n{markdown.END}After\n")
    for _ in range(2):  # a second run finds the marks again
        markdown.require_place(page)
        markdown.write(page, ROWS, {"date": "today"}, ["another: not installed: apt-get install it"], "make bench")
    text = page.read_text()
    assert text.startswith("# Before\n<!--")
    assert text.endswith("-->\nAfter\n")
    assert "of an older run" not in text
    assert text.count("`make bench`: today.") == 1
    assert "| alone | 1.5k msg/s | ≥ 1.0k | | | | | met |\n" in text
    assert "| msg/s | Custody | a peer | another |\n" in text
    assert "| publish | 300 | 100 (3 ×) | – |\n| consume | 200 | 8.0k (0.025 ×) | – |\n" in text
    assert "- another: not installed: apt-get install it\n" in text


def test_a_page_without_marks_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A page\n")
    done = run("--tiny", f"--markdown={page}")
    assert done.returncode == 1
    assert "add both lines, or name a new file" in done.stderr
    assert page.read_text() == "# A page\n"


def test_what_is_not_installed_is_said_below_the_table() -> None:
    written = io.StringIO()
    console.show(Console(width=120, file=written), ROWS, {"date": "today"}, [ROWS[-1].note or ""])
    table, _, below = written.getvalue().partition("consume")
    assert "another" in table
    assert "not installed: apt-get install it" in below


def test_contenders_take_turns_in_both_orders() -> None:
    order = []
    found = in_turn(2, {"a": lambda: order.append("a") or 1.0, "b": lambda: order.append("b") or 2.0})
    assert order == ["a", "b", "b", "a"]
    assert ratio(found["a"], found["b"]) == 0.5


def test_percentiles_of_samples() -> None:
    samples = Samples([float(number) for number in range(100)])
    assert samples.median == 49.5
    assert samples.percentile(0.95) == 95


@pytest.mark.parametrize(
    ("row", "passed"),
    [
        (Row(what="no target", measured=1, unit="s"), None),
        (Row(what="met", measured=2, unit="s", target=at_least(2)), True),
        (Row(what="missed", measured=2, unit="s", target=at_most(1)), False),
        (
            Row(what="one of two", measured=2, unit="s", target=at_least(1), ratio=0.5, ratio_target=at_least(0.6)),
            False,
        ),
    ],
)
def test_a_row_passes_when_all_its_targets_are_met(row: Row, passed: bool | None) -> None:
    assert row.passed is passed
