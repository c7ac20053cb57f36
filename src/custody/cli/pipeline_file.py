"""Loads the file with a user's pipelines so that its functions reach Spark's executors."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import typer

from custody import extras
from custody.cli.failed_import import explained
from custody.errors import PipelineRefused, did_you_mean

if TYPE_CHECKING:
    from custody.spark.pipeline import Pipeline


def pipelines_of(file: Path, only: str | None = None, *, shared: bool = True) -> list[Pipeline]:
    """The pipelines at the top level of a Python file, or the one named `only`, ready to run.

    `shared`: executors run on this machine and can import the file.
    """
    found = _distinct(file, _defined(load(file, shared=shared)))
    if not found:
        raise PipelineRefused(
            f"{file} has no pipeline", "Define one at its top level: pipeline = Pipeline(source=…, group=…)."
        )
    if only is not None:
        names = [pipeline.name for pipeline in found]
        if only not in names:
            raise typer.BadParameter(f"{file} has no pipeline {only!r}. {did_you_mean(only, names)}")
        found = [found[names.index(only)]]
    for pipeline in found:
        pipeline.require_complete()
    return found


def load(file: Path, *, shared: bool = True) -> ModuleType:
    """Imports the file as a module, so that code under `__main__` does not run. Call it before Spark is started.

    Executors on this machine import the file too, so its globals (a connection, for example) live as long as the
    worker process. For executors elsewhere, its functions and those of the modules beside it are pickled by value.
    """
    file = file.resolve()
    importable = shared and file.stem.isidentifier() and _is_free(file)
    spec = spec_from_file_location(file.stem if importable else f"custody_pipeline_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise PipelineRefused(f"{file.name} is not a Python file", "Its name has to end in .py.")
    before = set(sys.modules)
    module = sys.modules[spec.name] = module_from_spec(spec)
    sys.path.insert(0, str(file.parent))
    if shared:
        paths = [str(file.parent), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)  # for the Python workers that Spark will start
    with extras.named():
        from pyspark.cloudpickle import register_pickle_by_value
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[spec.name]
        raise extras.missing(error) or PipelineRefused(*explained(str(file), file.name, error)) from error
    if not shared:
        _send_along(file)
    beside = [] if shared else _modules_in(file.parent, set(sys.modules) - before)
    for own in [*([] if importable else [module]), *beside]:
        register_pickle_by_value(own)  # type: ignore[no-untyped-call]  # cloudpickle has no types
    return module


def _send_along(file: Path) -> None:
    """Ships the modules too: pickling by value covers functions, but not a module that one imports when it runs."""
    from custody.spark.environment import packing, shipping

    for name, parts in packing.modules(file).items():
        if name != file.stem:
            shipping.send_along(parts)


def _is_free(file: Path) -> bool:
    """Whether importing the file's name finds this file or nothing. False for json.py: there is another `json`."""
    if file.stem in sys.modules:
        return getattr(sys.modules[file.stem], "__file__", None) == str(file)
    found = find_spec(file.stem)
    return found is None or found.origin == str(file)


def _defined(module: ModuleType) -> Iterator[Pipeline]:
    """Pipelines among the module's globals, also those in a list or tuple."""
    from custody.spark.pipeline import Pipeline

    for value in vars(module).values():
        yield from (one for one in (value if isinstance(value, list | tuple) else [value]) if isinstance(one, Pipeline))


def _distinct(file: Path, defined: Iterator[Pipeline]) -> list[Pipeline]:
    """Each pipeline once, even if it has several names. Two pipelines of one group are refused: they would fence one
    another.
    """
    found: list[Pipeline] = []
    for pipeline in defined:
        if any(pipeline is other for other in found):
            continue
        if any(pipeline.name == other.name for other in found):
            raise PipelineRefused(
                f"{file} has two pipelines {pipeline.name}",
                "Give one of them another group: each group receives every message.",
            )
        found.append(pipeline)
    return found


def _modules_in(directory: Path, names: Iterable[str]) -> Iterator[ModuleType]:
    """Modules found directly in the directory, not those of a virtual environment inside it."""
    for name in names:
        place = directory.joinpath(*name.split("."))
        module = sys.modules[name]
        if getattr(module, "__file__", None) in (f"{place}.py", str(place / "__init__.py")):
            yield module
