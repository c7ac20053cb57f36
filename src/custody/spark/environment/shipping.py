"""Ships Custody's own package as a zip to Spark's executors, which need only its dependencies installed.

So executors always run the version of their driver, whatever is installed on their host.
"""

from __future__ import annotations

import shutil
import sys
import sysconfig
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
_STAMP = (1980, 1, 1, 0, 0, 0)  # of every file, so that archives are reproducible
_shipped: WeakSet[SparkContext] = WeakSet()
_along: dict[str, bytes] = {}


def send_along(content: Mapping[str, Path]) -> None:
    """Adds files to what is shipped: modules that a handler imports only when it runs."""
    _along.update({name: path.read_bytes() for name, path in content.items()})


def ship(spark: SparkSession) -> None:
    """Sends the package, and the modules beside the script, to the executors of a session, once for each context.

    Runs on the driver, before any query. Executors on this machine have the package already.
    """
    context = spark.sparkContext
    if context not in _shipped:
        content: dict[str, bytes | Path] = {**beside_the_script(), **_along, **({} if runs_here(context) else files())}
        if content:
            directory = temporary(context, "package")
            finalize(context, shutil.rmtree, directory, ignore_errors=True)
            package = directory / NAME
            with package.open("wb") as file:
                write(file, content)
            context.addPyFile(str(package))
        _shipped.add(context)
    if not runs_here(context):
        _show_to_sources(Path(SparkFiles.getRootDirectory()))


def temporary(context: SparkContext, what: str) -> Path:
    """A new directory inside Spark's own, which its JVM removes at its end, also if this process is killed."""
    return Path(tempfile.mkdtemp(prefix=f"custody-{what}-", dir=context._temp_dir))


def beside_the_script() -> dict[str, Path]:
    """The user's modules that the script of this process imports, by their name in an archive.

    Their functions are pickled by name, and an executor does not search the script's directory.
    """
    from custody.spark.environment import packing  # which imports this module

    main = sys.modules.get("__main__")
    file, spec = getattr(main, "__file__", None), getattr(main, "__spec__", None)
    if file is None or not Path(file).is_file() or Path(file).suffix != ".py":
        return {}  # a notebook, or an installed program
    script = Path(file).resolve()
    root = script.parents[0 if spec is None else spec.name.count(".")]  # `python -m shop.run` searches beside `shop`
    if any(root.is_relative_to(Path(sysconfig.get_path(one)).resolve()) for one in ("purelib", "platlib", "stdlib")):
        return {}
    found = packing.modules(script, root)
    found.pop(script.stem)
    return {name: path for parts in found.values() for name, path in parts.items()}


def _show_to_sources(root: Path) -> None:
    """Lets the process of a streaming source find the shipped files: Spark searches another directory there."""
    place = root / "streaming_job"
    place.mkdir(exist_ok=True)
    for file in root.iterdir():
        link = place / file.name
        if file.suffix in (".egg", ".py", ".zip") and not link.is_symlink():
            link.symlink_to(file)


def runs_here(context: SparkContext) -> bool:
    """Whether executors run on the driver's machine with its installation."""
    return str(context.master).startswith("local")


def files() -> dict[str, bytes]:
    """Custody's files by their name in a zip; read from a directory, or from the zip that this driver runs from."""
    found = dict(_below(resources.files("custody"), "custody"))
    loader = pyspark_custody.__loader__
    assert loader is not None
    assert pyspark_custody.__file__ is not None
    found["pyspark_custody.py"] = loader.get_data(pyspark_custody.__file__)  # type: ignore[attr-defined]
    return found


def write(file: IO[bytes], content: Mapping[str, bytes | Path], *, comment: bytes = b"") -> None:
    """Writes a zip of these files. Its bytes depend only on their names and contents."""
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
