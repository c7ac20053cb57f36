"""ARCHITECTURE.md names every folder and every module at the top, and none that is not there."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src/custody"


def layout() -> list[str]:
    (found,) = re.findall(
        r"^```\nsrc/custody/\n(.*?)^```", (ROOT / "ARCHITECTURE.md").read_text(), re.MULTILINE | re.DOTALL
    )
    return [line for line in found.splitlines() if line.startswith("  ")]


def test_every_folder_is_named_and_no_other() -> None:
    named = {name for line in layout() for name in re.findall(r"^  ([\w/]+)/(?: |$)", line)}
    there = {
        path.parent.relative_to(PACKAGE).as_posix()
        for kind in ("*.py", "*.sql", "*.md")
        for path in PACKAGE.rglob(kind)
    }
    assert named == there - {"."}


def test_every_module_at_the_top_is_named_and_no_other() -> None:
    named = {name for line in layout() for name in re.findall(r"\b(\w+\.py)\b", line)}
    assert named == {path.name for path in PACKAGE.glob("*.py") if not path.name.startswith("__")}


def test_every_file_that_the_way_of_a_message_names_is_there() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    names = re.findall(r"`([\w/]+/\w+\.(?:py|sql))`", text)
    assert names
    assert [name for name in names if not any(PACKAGE.rglob(name))] == []


def test_every_file_begins_with_what_it_is() -> None:
    modules = [path for path in PACKAGE.rglob("*.py") if not path.read_text("utf-8").startswith('"""')]
    scripts = [path for path in PACKAGE.rglob("*.sql") if not path.read_text("utf-8").startswith("-- ")]
    assert [path.relative_to(PACKAGE).as_posix() for path in modules + scripts] == []
