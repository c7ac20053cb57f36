"""`custody ui` as a process: it says where the dashboard is."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from tests.cli.test_serve import start
from tests.http.conftest import Http
from tests.waiting import wait_for


@pytest.mark.req("N6")
def test_it_serves_the_dashboard_until_it_is_interrupted(database_url: str, tmp_path: Path) -> None:
    with start(database_url, tmp_path, "--json", "ui", "--port", "0") as process:
        url = json.loads(process.stdout.readline())["url"]
        http = Http(url)
        assert url.endswith("/ui")
        wait_for(lambda: http.get("/readyz").status == 200, "it is ready")
        assert b"There are no groups yet" in http.get("/ui").body
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
        assert (process.returncode, "Traceback" in errors) == (0, False)
