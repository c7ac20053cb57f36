"""ARCHITECTURE.md names every module and every file of SQL functions, and none that is not there."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def named() -> set[str]:
    """The files in its layouts. A line begins in the folder of its layout; a path leads to another until its end."""
    found = set()
    text = (ROOT / "ARCHITECTURE.md").read_text()
    for language, layout in re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        if language:
            continue
        top = layout.split()[0].removeprefix("src/custody/").rpartition("/")[0]
        for line in layout.splitlines():
            folder = top
            for path, name in re.findall(r"([\w/]*/)?(\w+\.(?:py|sql))\b", line):
                folder = path.rstrip("/") or folder
                found.add(f"{folder}/{name}".lstrip("/"))
    return found


def test_every_file_is_named_in_the_layout_and_no_other() -> None:
    package = ROOT / "src/custody"
    files = {path.relative_to(package) for kind in ("*.py", "*.sql") for path in package.rglob(kind)}
    modules = {str(path) for path in files if not path.name.startswith("__")}
    assert named() == modules
