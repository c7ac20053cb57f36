"""The JVMs of tests: `make test` starts one for minutes, `make test-chaos` some thirty that live for seconds.

So they compile quickly rather than well, and have room for all code that they compile: else the JVM would remove code
and compile it again. Where many start they take Spark's classes out of an archive (AppCDS), which parses and verifies
them once for all: it costs as much as it saves for seven JVMs. Tests that say how Custody itself starts Java
(tests/spark/test_session.py) clear this away.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from custody.spark.environment import installed, java

FLAGS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:ReservedCodeCacheSize=256m"
TRAINING = Path(__file__).parent / "spark" / "training.py"
STARTUP = Path(__file__).parent / "spark" / "startup"
PAYS = 10
"""Tests with drivers in processes of their own, from which on the archive saves more than it costs to make it."""


def quicken(archive: Path | None = None) -> None:
    """For every JVM that this process and its children start from now on."""
    # a JVM with another class path goes on without the archive, and would say so on stdout
    shared = "" if archive is None else f" -XX:SharedArchiveFile={archive} -Xlog:cds*=off"
    os.environ["SPARK_SUBMIT_OPTS"] = FLAGS + shared
    os.environ["SPARK_LAUNCHER_OPTS"] = FLAGS
    # for sessions that are not ours too
    ours = [str(installed.STARTUP), str(STARTUP)]
    others = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry not in ("", *ours)]
    os.environ["PYTHONPATH"] = os.pathsep.join([*ours, *others])


def variables() -> dict[str, str]:
    """The same for an environment that was cleared of settings of Spark."""
    return {name: os.environ[name] for name in ("SPARK_SUBMIT_OPTS", "SPARK_LAUNCHER_OPTS")}


def archive_in(directory: Path) -> Path | None:
    """Where the archive for this Java, this Spark and this training is or will be; None if this Java takes none."""
    found, _ = java._look()
    base = None if found is None else found.home / "lib" / "server" / "classes.jsa"
    if base is None or not base.exists():
        return None  # the wheel's has none: an archive stands on the one that comes with Java
    made_for = [str(base), str(base.stat().st_mtime), sys.prefix, version("pyspark"), FLAGS]
    named = hashlib.sha256("\n".join([*made_for, TRAINING.read_text(encoding="utf-8")]).encode()).hexdigest()[:16]
    return directory / f"spark-{named}.jsa"


def make(archive: Path) -> None:
    """Makes it, unless somebody else is at it. A run that is killed leaves nothing that the next one would trust."""
    with archive.with_suffix(".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        with tempfile.TemporaryDirectory(dir=archive.parent) as place:
            draft = Path(place, "draft.jsa")
            dump = f"{FLAGS} -XX:ArchiveClassesAtExit={draft} -Xlog:cds*=off"
            subprocess.run(
                [sys.executable, "-m", "tests.spark.training", place],
                cwd=TRAINING.parents[2],
                env={**os.environ, "SPARK_SUBMIT_OPTS": dump},
                stdin=subprocess.DEVNULL,
                timeout=280,
                check=True,
            )
            for older in archive.parent.glob("*.jsa"):
                older.unlink()
            draft.rename(archive)
