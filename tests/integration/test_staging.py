"""The connection of a task's process: opened once, and closed with the process."""

from __future__ import annotations

import subprocess
import sys

import psycopg

from custody import Custody
from custody.store import staging


def test_a_process_that_ends_leaves_no_connection_open(c: Custody, database_url: str) -> None:
    c.create_topic("orders")
    code = "import sys\nfrom custody.store import staging\nstaging.call(sys.argv[1], 'layout', topic='orders')"
    done = subprocess.run(
        [sys.executable, "-W", "default", "-c", code, database_url], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_connection_is_kept_until_all_are_closed(database_url: str) -> None:
    def backend() -> int:
        with staging.connection(database_url) as held:
            return held.info.backend_pid

    first = backend()
    assert backend() == first
    staging.close_all()
    assert backend() != first
    with psycopg.connect(database_url, autocommit=True) as other:
        other.execute("SELECT pg_terminate_backend(%s, 5000)", [backend()])
    with staging.connection(database_url) as held:
        assert held.execute("SELECT 1").fetchone() == (1,)
