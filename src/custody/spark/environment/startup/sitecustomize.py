"""Runs at the start of each Python process of a local Spark, because `installed.py` puts this directory on PYTHONPATH.

Spark puts a zip of PySpark before everything else that its processes import from. A zip keeps no bytecode, so each of
them would compile PySpark again, which takes longer than all else that it imports. The package beside the zip is the
same, and has its bytecode.
"""

import importlib
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))
_LIBRARIES = os.path.join("pyspark", "python", "lib", "")


def _is_installed_too(entry: str) -> bool:
    """Whether this is one of Spark's zips, and what is in it is installed where this process imports from as well."""
    directory, found, name = entry.rpartition(_LIBRARIES)
    package = name.partition("-")[0].removesuffix(".zip")  # pyspark.zip, py4j-0.10.9.9-src.zip
    return (
        bool(found)
        and name.endswith(".zip")
        and os.path.dirname(directory) in sys.path
        and os.path.exists(os.path.join(directory, package, "__init__.py"))
    )


def _run_the_next() -> None:
    """Runs the module of this name that Python would have found without this directory, if there is one."""
    this = sys.modules.pop(__name__)
    try:
        importlib.import_module(__name__)
    except ModuleNotFoundError as error:
        if error.name != __name__:
            raise
    finally:
        sys.modules.setdefault(__name__, this)


sys.path[:] = [entry for entry in sys.path if entry != _HERE and not _is_installed_too(entry)]
if __name__ == "sitecustomize":
    _run_the_next()
