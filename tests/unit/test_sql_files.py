"""The files of SQL, as a reader sees them."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_lines_are_wrapped_at_120_columns() -> None:
    files = [path for folder in ("src", "tests", "examples", "bench") for path in (ROOT / folder).rglob("*.sql")]
    assert files
    long = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in files
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if len(line) > 120
    ]
    assert long == []
