"""Spark's Python processes import what is installed, and not the zips that Spark puts before it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pyspark

from custody.spark.environment import installed

PACKAGE = Path(pyspark.__file__).parent
FOUND = "import importlib.util as u; print(*(u.find_spec(name).origin for name in ('pyspark', 'py4j')), sep='\\n')"


def found(path: list[Path], program: str = FOUND) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": os.pathsep.join(map(str, path))},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    return done.stdout.split()


def test_a_zip_of_what_is_installed_is_passed_over() -> None:
    zips = sorted((PACKAGE / "python/lib").glob("*.zip"), reverse=True)
    assert [one.name.partition("-")[0] for one in zips] == ["pyspark.zip", "py4j"]
    assert all(".zip" in one for one in found(zips))
    assert found([installed.STARTUP, *zips]) == [
        str(PACKAGE.parent / one / "__init__.py") for one in ("pyspark", "py4j")
    ]


def test_another_spark_keeps_its_zips(tmp_path: Path) -> None:
    other = tmp_path / "pyspark/python/lib/pyspark.zip"
    other.parent.mkdir(parents=True)
    other.write_bytes((PACKAGE / "python/lib/pyspark.zip").read_bytes())
    assert found([installed.STARTUP, other])[0].startswith(str(other))


def test_the_start_of_others_runs_as_well(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('theirs')")
    program = "import sys; print(sys.modules['sitecustomize'].__file__)"
    assert found([installed.STARTUP, tmp_path], program) == ["theirs", str(tmp_path / "sitecustomize.py")]
    assert found([installed.STARTUP], "import sitecustomize") == []


def test_only_the_jvm_gets_the_path() -> None:
    before = os.environ.get("PYTHONPATH")
    with installed.preferred():
        assert os.environ["PYTHONPATH"].split(os.pathsep)[0] == str(installed.STARTUP)
    assert os.environ.get("PYTHONPATH") == before
