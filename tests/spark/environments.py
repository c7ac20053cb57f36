"""Pythons as executors elsewhere have them: without Custody, or without anything at all."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path


def bare(place: Path) -> Path:
    """A Python with nothing but its standard library."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True)
    return place / "bin" / "python"


def without_custody(place: Path) -> Path:
    """A Python with every package that is installed here, but Custody."""
    python = bare(place)
    (site,) = place.glob("lib/python*/site-packages")
    for entry in Path(sysconfig.get_path("platlib")).iterdir():
        if "custody" not in entry.name and entry.suffix != ".pth":
            (site / entry.name).symlink_to(entry)
    missing = subprocess.run(
        [python, "-c", "import psycopg, pyspark, custody"], capture_output=True, text=True, check=False
    )
    assert "No module named 'custody'" in missing.stderr, missing.stderr
    return python
