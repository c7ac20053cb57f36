"""A real PgBouncer before the server of the tests, in transaction and in session mode."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict
from tests.waiting import wait_for

PLACES = ("/usr/sbin/pgbouncer", "/usr/local/bin/pgbouncer", "/opt/homebrew/bin/pgbouncer")
POOL = 3
"""Few backends for many clients: each transaction may get another one."""


def found() -> str:
    """PgBouncer's program. Where these tests have to run, its absence is a failure."""
    program = shutil.which("pgbouncer") or next((place for place in PLACES if Path(place).exists()), None)
    if program is None:
        say = "PgBouncer is not installed (apt-get install pgbouncer): nothing was tested behind a pooler"
        if os.environ.get("CI") == "true":
            pytest.fail(say)
        pytest.skip(say)
    return program


@contextmanager
def pgbouncer(server_url: str, mode: str) -> Iterator[tuple[str, int]]:
    """Runs it; where it listens."""
    program, server = found(), conninfo_to_dict(server_url)
    host, port = str(server.get("host") or "127.0.0.1"), int(server.get("port") or 5432)
    with socket.create_server(("127.0.0.1", 0)) as free:
        listens = free.getsockname()[1]
    directory = Path(tempfile.mkdtemp(prefix="custody-pgbouncer-"))
    login = f"user={server.get('user') or 'postgres'}"
    if server.get("password"):
        login += f" password={server['password']}"
    config = directory / "pgbouncer.ini"
    config.write_text(
        f"""[databases]
* = host={host} port={port} {login}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {listens}
unix_socket_dir =
auth_type = any
pool_mode = {mode}
default_pool_size = {POOL if mode == "transaction" else 40}
max_client_conn = 200
server_idle_timeout = 1
logfile = {directory}/log
"""
    )
    as_user: dict[str, int] = {}
    if os.getuid() == 0:  # it refuses to run as root
        place = Path(host) / f".s.PGSQL.{port}"
        owner = os.stat(place).st_uid if host.startswith("/") else 65534
        as_user = {"user": owner, "group": os.stat(place).st_gid if host.startswith("/") else 65534}
        for path in (directory, config):
            os.chown(path, as_user["user"], as_user["group"])
    process = subprocess.Popen([program, "-q", str(config)], stdout=subprocess.DEVNULL, **as_user)

    def accepts() -> bool:
        log = directory / "log"
        assert process.poll() is None, f"PgBouncer ended: {log.read_text() if log.exists() else 'without a word'}"
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", listens)) == 0

    try:
        wait_for(accepts, "PgBouncer does not listen")
        yield "127.0.0.1", listens
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(10)
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="session", params=["transaction", "session"])
def mode(request: pytest.FixtureRequest) -> str:
    mode: str = request.param
    return mode


@pytest.fixture(scope="session")
def pooler(server_url: str, mode: str) -> Iterator[tuple[str, int]]:
    with pgbouncer(server_url, mode) as place:
        yield place


def through(pooler: tuple[str, int], url: str) -> str:
    """The same database by way of the pooler."""
    parts = conninfo_to_dict(url)
    return f"postgresql://{parts.get('user') or 'postgres'}@{pooler[0]}:{pooler[1]}/{parts['dbname']}?sslmode=disable"


@pytest.fixture
def pooled_url(pooler: tuple[str, int], database_url: str) -> str:
    return through(pooler, database_url)


@pytest.fixture
def run_cli(tmp_path: Path) -> Callable[..., Any]:
    """Runs a command with --json, and gives its document."""

    def run(*arguments: str) -> Any:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("CUSTODY_")}
        command = [sys.executable, "-m", "custody", *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=kept, capture_output=True, timeout=60, check=True)
        return json.loads(done.stdout)

    return run


@pytest.fixture
def db(database_url: str) -> Iterator[psycopg.Connection]:
    """A plain connection past the pooler."""
    with psycopg.connect(database_url, autocommit=True) as connection:
        yield connection
