"""`custody serve` as a process: it says where it serves, stops on both signals, and refuses what it cannot use."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.cli.conftest import Run
from tests.http.conftest import Http
from tests.waiting import wait_for

from custody.model.server_settings import ServerSettings
from custody.model.setting import settings_of


@contextmanager
def start(database_url: str, cwd: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "custody", "--database", database_url, *arguments]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=cwd, env={**os.environ, "NO_COLOR": "1"}
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


@pytest.mark.req("G18")
@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_it_says_where_it_serves_and_stops_with_success(database_url: str, tmp_path: Path, stop: int) -> None:
    with start(database_url, tmp_path, "--json", "serve", "--port", "0") as server:
        http = Http(json.loads(server.stdout.readline())["url"])
        wait_for(lambda: http.get("/readyz").json == {"status": "ready"}, "it is ready")
        server.send_signal(stop)
        output, errors = server.communicate(timeout=20)
        assert (server.returncode, output) == (0, "")
        assert "Traceback" not in errors


def test_people_are_told_in_words(database_url: str, tmp_path: Path) -> None:
    with start(database_url, tmp_path, "serve", "--port", "0") as server:
        line = server.stdout.readline()
        server.terminate()
        server.communicate(timeout=20)
    assert line.startswith("Custody serves on http://127.0.0.1:")


def test_a_port_that_is_taken_is_refused_with_a_remedy(database_url: str, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with start(database_url, tmp_path, "serve", "--port", str(taken.getsockname()[1])) as server:
            _, errors = server.communicate(timeout=20)
    assert server.returncode != 0
    assert "cannot serve on 127.0.0.1" in errors
    assert "--port" in errors


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--tls-cert", "only.pem"], 1, "TLS needs a certificate and its key"),
        (["--max-body", "much"], 2, "is not a size"),
        (["--connections", "0"], 2, "connections"),
        (["--body-timeout", "0s"], 1, "body_timeout"),
        (["--port", "65536"], 1, "from 0 to 65,535"),
        (["--origin", "https://app.example.com/path"], 1, "is not an origin"),
    ],
)
def test_settings_that_make_no_sense_are_refused(quick: Run, arguments: list[str], code: int, said: str) -> None:
    refused = quick("serve", *arguments, code=code)
    assert said in refused.err
    assert "Traceback" not in refused.err


def test_every_setting_of_a_server_is_an_option_with_its_default(quick: Run) -> None:
    said = quick("serve", "--help").out
    for setting in settings_of(ServerSettings):
        name = {"origins": "origin"}.get(setting.name, setting.name)
        assert f"--{name.replace('_', '-')}" in said
    assert "[default: 16MB]" in said
    assert "--no-coalesce" in said
