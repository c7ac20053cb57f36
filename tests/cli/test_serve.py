"""`custody serve` as a process: it says where it serves, stops on both signals, and refuses what it cannot use."""

from __future__ import annotations

import dataclasses
import inspect
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
from tests.http.conftest import Http
from tests.waiting import wait_for

from custody.cli.serve import serve
from custody.http import Settings


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
    ("arguments", "said"),
    [
        (["--tls-cert", "only.pem"], "TLS needs a certificate and its key"),
        (["--max-body", "much"], "is not a size"),
        (["--connections", "0"], "connections"),
    ],
)
def test_settings_that_make_no_sense_are_refused(
    database_url: str, tmp_path: Path, arguments: list[str], said: str
) -> None:
    with start(database_url, tmp_path, "serve", "--port", "0", *arguments) as server:
        _, errors = server.communicate(timeout=20)
    assert server.returncode != 0
    assert said in errors
    assert "Traceback" not in errors


def test_its_options_have_the_defaults_of_a_server() -> None:
    options = inspect.signature(serve).parameters
    fields = {field.name: field.default for field in dataclasses.fields(Settings) if field.name in options}
    assert len(fields) > 15
    assert {name: options[name].default for name in fields} == fields
