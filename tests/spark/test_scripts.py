"""A script that is started with `python`: the modules beside it reach the executors, wherever it is started from."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.spark.cluster import Cluster
from tests.spark.programs import environment, finish
from tests.waiting import wait_for

import custody

pytestmark = [pytest.mark.req("S5"), pytest.mark.timeout(600)]

SHOP = """
import custody
from custody.spark import Pipeline
from custody.spark.session import session
from rules import doubled

pipeline = Pipeline(source="in", group="g", sink="out", policy=custody.Policy(max_attempts=1))

@pipeline.each
def handle(message):
    import late
    return {"n": late.more(doubled(message.payload))}

if __name__ == "__main__":
    settings = {"spark.ui.enabled": "false", "spark.driver.memory": "1g"}
    spark = session(master=MASTER, config=settings)
    summary = pipeline.run(spark=spark, drain="60s")
    print("done:", summary.done, "dead:", summary.dead)
    spark.stop()
"""
BESIDE = {
    "rules/__init__.py": "from rules.numbers import doubled\n",
    "rules/numbers.py": "def doubled(n):\n    from rules.factors import TWO\n    return TWO * n\n",
    "rules/factors.py": "TWO = 2\n",
    "late.py": "def more(n):\n    return n + 1\n",
}


def written(place: Path, master: str) -> Path:
    for name, text in BESIDE.items():
        (place / "shop" / name).parent.mkdir(parents=True, exist_ok=True)
        (place / "shop" / name).write_text(text)
    script = place / "shop" / "shop.py"
    script.write_text(SHOP.replace("MASTER", repr(master)))
    return script


def published(c: custody.Custody) -> None:
    c.create_topic("in", partitions=2)
    c.create_topic("out")
    c.publish_many("in", [custody.Outgoing(n, key=f"k{n}") for n in range(20)])


def outputs(c: custody.Custody) -> list[int]:
    return sorted(message.payload["n"] for message in c.read("out", 0))


@pytest.mark.chaos
def test_modules_beside_a_script_reach_local_executors(database_url: str, tmp_path: Path) -> None:
    script = written(tmp_path, "local[2,4]")
    with custody.connect(database_url) as c:
        published(c)
        code, said = finish([sys.executable, script], tmp_path, environment(CUSTODY_DATABASE=database_url))
        assert code == 0, said[-3000:]
        assert "done: 20 dead: 0" in said
        assert outputs(c) == [2 * n + 1 for n in range(20)]


@pytest.mark.chaos
def test_modules_beside_a_script_reach_a_cluster(spark_cluster: Cluster, database_url: str, tmp_path: Path) -> None:
    script = written(tmp_path, spark_cluster.url)
    with custody.connect(database_url) as c:
        published(c)
        spark_cluster.be_ready()
        known = spark_cluster.environment(CUSTODY_DATABASE=database_url)
        code, said = finish([sys.executable, script], tmp_path, known)
        assert code == 0, said[-3000:]
        assert outputs(c) == [2 * n + 1 for n in range(20)]


HANGS = """
import ctypes, os, signal
import custody
from custody.spark import Pipeline
from rules import doubled

pipeline = Pipeline(source="in", group="g", sink="out", policy=custody.Policy(handler_timeout=None))

@pipeline.each
def handle(message):
    with open("pid.tmp", "w") as file:
        file.write(str(os.getpid()))
    os.rename("pid.tmp", "pid")
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    ctypes.PyDLL(None).sleep(100_000)

if __name__ == "__main__":
    pipeline.run(master="local[2,4]")
"""


@pytest.mark.chaos
def test_a_script_that_is_killed_leaves_no_process_and_no_directory(database_url: str, tmp_path: Path) -> None:
    script = written(tmp_path, "local[2,4]")
    script.write_text(HANGS)
    places = [tmp_path / "tmp", tmp_path / "spark"]
    for place in places:
        place.mkdir()
    known = environment(
        CUSTODY_DATABASE=database_url, TMPDIR=str(places[0]), SPARK_LOCAL_DIRS=str(places[1]), PYTHONUNBUFFERED="1"
    )

    def worker_lives() -> bool:
        return Path("/proc", (tmp_path / "pid").read_text()).exists()

    def left() -> list[Path]:
        return [path for place in places for path in place.iterdir()]

    with custody.connect(database_url) as c:
        published(c)
    with (
        (tmp_path / "said").open("w") as said,
        subprocess.Popen([sys.executable, script], cwd=tmp_path, env=known, stdout=said, stderr=said) as process,
    ):
        try:
            wait_for(
                lambda: (tmp_path / "pid").exists() or process.poll() is not None, "no handler was called", timeout=120
            )
            assert worker_lives(), (tmp_path / "said").read_text()[-3000:]
            assert left()
        finally:
            os.kill(process.pid, signal.SIGKILL)
    wait_for(lambda: not worker_lives(), "a handler that hangs has outlived its driver", timeout=60)
    wait_for(lambda: not left(), "directories of a killed driver stay behind", timeout=60)
