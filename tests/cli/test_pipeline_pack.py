"""custody pipeline pack: an archive with what a pipeline's file needs, and nothing overwritten that is not its own."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from tests.cli.conftest import Run

from custody.spark.environment import packing

pytestmark = pytest.mark.req("S5")

FRAUD = """
import json
import fraud_rules
from custody.spark import Pipeline

pipeline = Pipeline(source="orders", group="fraud", sink="screened")

@pipeline.each
def screen(message):
    from shapes import circles
    return fraud_rules.checked(message.payload)
"""


@pytest.fixture(autouse=True)
def _files(tmp_path: Path) -> None:
    (tmp_path / "fraud.py").write_text(FRAUD)
    (tmp_path / "fraud_rules.py").write_text("import limits\nchecked = limits.of\n")
    (tmp_path / "limits.py").write_text("def of(number): return min(number, 5)\n")
    (tmp_path / "unused.py").write_text("1 / 0\n")
    (tmp_path / "shapes").mkdir()
    for name in ("__init__.py", "circles.py", "squares.py", "sizes.csv"):
        (tmp_path / "shapes" / name).write_text("")


def test_a_file_of_a_package_that_is_no_module_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "shapes" / "template.py").write_text("class {{ name }}:\n")
    (tmp_path / "shapes" / "zeros.py").write_bytes(b"\0\0")
    found = packing.modules(tmp_path / "fraud.py")
    assert {"shapes/template.py", "shapes/zeros.py"} <= set(found["shapes"])


def test_an_archive_has_custody_the_file_and_what_it_imports_beside_it(quick: Run, tmp_path: Path, explained) -> None:
    document = quick("pipeline", "pack", "fraud.py", "--json").document
    explained(document)
    assert document["command"] == [
        *["spark-submit", "--master", "spark://HOST:7077", "--py-files", "fraud.zip"],
        "fraud.py",
    ]
    assert document["archive"]["contents"] == ["fraud", "fraud_rules", "limits", "shapes"]
    with zipfile.ZipFile(tmp_path / "fraud.zip") as archive:
        names = archive.namelist()
    assert len(names) == document["archive"]["files"]
    own = {name for name in names if not name.startswith("custody/")}
    assert own == {
        "pyspark_custody.py",
        "fraud.py",
        "fraud_rules.py",
        "limits.py",
        *(f"shapes/{name}" for name in ("__init__.py", "circles.py", "squares.py", "sizes.csv")),
    }
    assert {"custody/spark/tasks/each.py", "custody/store/sql/claim/claim.sql", "custody/py.typed"} <= set(names)
    assert not [name for name in names if "__pycache__" in name]


def test_the_same_files_make_the_same_bytes_and_only_its_own_are_replaced(quick: Run, tmp_path: Path) -> None:
    quick("pipeline", "pack", "fraud.py")
    first = (tmp_path / "fraud.zip").read_bytes()
    (tmp_path / "limits.py").touch()
    quick("pipeline", "pack", "fraud.py")
    assert (tmp_path / "fraud.zip").read_bytes() == first
    assert quick("pipeline", "pack", "fraud.py", "--output", "other.zip").out.split()[4] == "other.zip"
    assert (tmp_path / "other.zip").read_bytes() == first
    with zipfile.ZipFile(tmp_path / "mine.zip", "w") as archive:
        archive.writestr("letter.txt", "dear")
    (tmp_path / "text.zip").write_text("dear")
    for name in ("mine.zip", "text.zip"):
        before = (tmp_path / name).read_bytes()
        error = quick("pipeline", "pack", "fraud.py", "--output", name, "--json", code=1).error
        assert (error["code"], "was not made by" in error["message"]) == ("pipeline_refused", True)
        assert (tmp_path / name).read_bytes() == before
    assert not list(tmp_path.glob(".*.zip-*")), "no drafts are left"


def test_what_cannot_be_packed(quick: Run, tmp_path: Path) -> None:
    (tmp_path / "empty.py").write_text("")
    assert "has no pipeline" in quick("pipeline", "pack", "empty.py", code=1).err
    (tmp_path / "fraud-2.py").write_text(FRAUD)
    assert "cannot be imported under its name" in quick("pipeline", "pack", "fraud-2.py", code=1).err
    assert "end in .zip" in quick("pipeline", "pack", "fraud.py", "--output", "fraud.tar", code=2).err
    assert "cannot be written" in quick("pipeline", "pack", "fraud.py", "--output", "nowhere/fraud.zip", code=1).err
    assert "--with-dependencies" in quick("pipeline", "pack", "--help", "--no-color").out


def test_the_distributions_that_executors_need() -> None:
    names = {one.name.lower().replace("_", "-") for one in packing.dependencies()}
    assert {"adbc-driver-postgresql", "msgspec", "numpy", "pandas", "psycopg", "psycopg-binary", "pyarrow"} <= names
    assert not names & {*packing.NOT_SENT, "custody", "pytest", "typer", "rich"}
