"""Custody's own package as a zip for Spark's executors: they need what it depends on, but not Custody itself.

So executors always run the version of their driver, whatever is installed where they are.
"""

from __future__ import annotations

import shutil
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import IO
from weakref import WeakSet, finalize

from pyspark import SparkContext, SparkFiles
from pyspark.sql import SparkSession

import pyspark_custody

NAME = "custody.zip"
_STAMP = (1980, 1, 1, 0, 0, 0)  # of every file, so that the same files make the same bytes
_shipped: WeakSet[SparkContext] = WeakSet()
_along: dict[str, bytes] = {}


def send_along(content: Mapping[str, Path]) -> None:
    """Files that executors are to find beside the package: modules that a handler imports only when it runs."""
    _along.update({name: path.read_bytes() for name, path in content.items()})


def ship(spark: SparkSession) -> None:
    """Sends the package to the executors of a session, once for each context. Runs on the driver, before any query."""
    context = spark.sparkContext
    if runs_here(context):
        return
    if context not in _shipped:
        directory = Path(tempfile.mkdtemp(prefix="custody-package-"))
        finalize(context, shutil.rmtree, directory, ignore_errors=True)
        package = directory / NAME
        with package.open("wb") as file:
            write(file, {**_along, **files()})
        context.addPyFile(str(package))
        _shipped.add(context)
    _show_to_sources(Path(SparkFiles.getRootDirectory()))


def _show_to_sources(root: Path) -> None:
    """Lets the process of a streaming source find what was sent: Spark 4.3 looks in another directory there."""
    place = root / "streaming_job"
    place.mkdir(exist_ok=True)
    for file in root.iterdir():
        link = place / file.name
        if file.suffix in (".egg", ".py", ".zip") and not link.is_symlink():
            link.symlink_to(file)


def runs_here(context: SparkContext) -> bool:
    """Whether executors run on the driver's machine, out of its own installation."""
    return str(context.master).startswith("local")


def files() -> dict[str, bytes]:
    """What Custody consists of, by the name in a zip; from a directory, or from the zip that this driver runs from."""
    found = dict(_below(resources.files("custody"), "custody"))
    loader = pyspark_custody.__loader__
    assert loader is not None
    assert pyspark_custody.__file__ is not None
    found["pyspark_custody.py"] = loader.get_data(pyspark_custody.__file__)  # type: ignore[attr-defined]
    return found


def write(file: IO[bytes], content: Mapping[str, bytes | Path], *, comment: bytes = b"") -> None:
    """A zip of these files, whose bytes follow from their names and content alone."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        archive.comment = comment
        for name in sorted(content):
            head = zipfile.ZipInfo(name, _STAMP)
            head.compress_type, head.create_system, head.external_attr = zipfile.ZIP_DEFLATED, 3, 0o644 << 16
            one = content[name]
            archive.writestr(head, one if isinstance(one, bytes) else one.read_bytes(), compresslevel=1)


def _below(directory: Traversable, name: str) -> Iterator[tuple[str, bytes]]:
    for one in directory.iterdir():
        if one.is_dir():
            if one.name != "__pycache__":
                yield from _below(one, f"{name}/{one.name}")
        elif not one.name.endswith((".pyc", ".pyo")):
            yield f"{name}/{one.name}", one.read_bytes()
