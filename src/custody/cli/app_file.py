"""Finds what a command shall run: an app or a function, in a file or a module."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import typer

from custody import extras
from custody.app import App
from custody.cli.failed_import import explained
from custody.errors import CustodyError, InvalidArgument
from custody.model.entities import Message


def target(given: str) -> App | Callable[[Message], object]:
    """The app or function that `file.py`, `module`, or one of both with `:name`, means.

    Without a name it is the only app of the file. An app without a name gets that of its file.
    """
    place, colon, path = given.partition(":")
    if not place or (colon and not path):
        raise typer.BadParameter(f"{given!r} is not FILE, MODULE or MODULE:NAME, such as app.py or handlers:handle")
    found: Any = imported(given) if colon else _app_of(place, _loaded(place))
    if isinstance(found, App):
        found.name = found.name or Path(place).stem.rpartition(".")[2]
    elif not callable(found):
        raise typer.BadParameter(f"{given} is a {type(found).__name__}, and neither an app nor a function")
    return found  # type: ignore[no-any-return]  # whatever the module has under that name


def imported(given: str) -> Any:
    """The object `file.py:name` or `module:name`."""
    place, colon, path = given.partition(":")
    if not colon or not place or not path:
        raise typer.BadParameter(f"{given!r} is not MODULE:NAME, such as handlers:handle")
    found: Any = _loaded(place)
    for part in path.split("."):
        if not hasattr(found, part):
            raise typer.BadParameter(f"{place} has no {path!r}")
        found = getattr(found, part)
    return found


def _loaded(place: str) -> ModuleType:
    return _file(Path(place)) if place.endswith(".py") else _module(place)


def _file(file: Path) -> ModuleType:
    """Imports a file. Its directory is searched first for what it imports."""
    if not file.is_file():
        raise typer.BadParameter(f"there is no file {file}")
    sys.path.insert(0, str(file.resolve().parent))
    spec = spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = module_from_spec(spec)  # also if it has the name of another module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise _refused(file.absolute(), file.name, error) from error
    return module


def _module(name: str) -> ModuleType:
    """Imports a module; the current directory is searched first."""
    sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        lacks = error.name if isinstance(error, ModuleNotFoundError) else None
        if lacks is not None and f"{name}.".startswith(f"{lacks}."):  # and not something that the module imports
            raise typer.BadParameter(f"there is no module {name!r} in {Path.cwd()} or installed") from error
        file = Path.cwd().joinpath(*name.split(".")).with_suffix(".py")
        raise _refused(file, file.name if file.is_file() else name, error) from error


def _refused(file: Path, name: str, error: BaseException) -> CustodyError:
    """The error that importing the user's file has raised, with its line."""
    return extras.missing(error) or InvalidArgument(*explained(str(file), name, error))


def _app_of(place: str, module: ModuleType) -> App:
    apps = [(name, value) for name, value in vars(module).items() if isinstance(value, App)]
    if not apps:
        raise typer.BadParameter(
            f"{place} has no app: write app = custody.App() in it, or name a function, such as {place}:handle"
        )
    if len({id(app) for _, app in apps}) > 1:
        raise typer.BadParameter(f"{place} has several apps: name one, such as {place}:{apps[0][0]}")
    return apps[0][1]
