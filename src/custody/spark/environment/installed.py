"""Lets the Python processes of a local Spark import the installed PySpark, and not Spark's zip of it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

STARTUP = Path(__file__).with_name("startup")


@contextlib.contextmanager
def preferred() -> Iterator[None]:
    """For the JVM that is started meanwhile, which passes its PYTHONPATH on to all processes that it starts.

    The variable is restored afterwards: other children of this process have nothing to do with Spark.
    """
    given = os.environ.get("PYTHONPATH")
    if STARTUP.is_dir():  # not in a driver that runs from a zip
        os.environ["PYTHONPATH"] = os.pathsep.join([str(STARTUP), *([given] if given else [])])
    try:
        yield
    finally:
        if given is not None:
            os.environ["PYTHONPATH"] = given
        else:
            os.environ.pop("PYTHONPATH", None)
