"""Runs at the start of each Python that a test starts, because tests/jvm.py puts this directory on PYTHONPATH.

Spark puts its own zip before everything else that its workers import from. That has no bytecode, so each of them would
compile PySpark again: half of the time that a short query takes. The package that is installed here is the same.
"""

import sys
from importlib.machinery import PathFinder

_rest = [entry for entry in sys.path if not (entry.endswith(".zip") and "/pyspark/python/lib/" in entry)]
if len(_rest) < len(sys.path) and PathFinder.find_spec("pyspark", _rest) is not None:
    sys.path[:] = _rest
