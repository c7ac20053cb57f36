"""A script that is started with `python`: the modules beside it reach the executors, wherever it is started from."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.spark.cluster import Cluster
from tests.spark.programs import environment, finish

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


def test_modules_beside_a_script_reach_local_executors(database_url: str, tmp_path: Path) -> None:
    script = written(tmp_path, "local[2,4]")
    with custody.connect(database_url) as c:
        published(c)
        code, said = finish([sys.executable, script], tmp_path, environment(CUSTODY_DATABASE=database_url))
        assert code == 0, said[-3000:]
        assert "done: 20 dead: 0" in said
        assert outputs(c) == [2 * n + 1 for n in range(20)]


def test_modules_beside_a_script_reach_a_cluster(spark_cluster: Cluster, database_url: str, tmp_path: Path) -> None:
    script = written(tmp_path, spark_cluster.url)
    with custody.connect(database_url) as c:
        published(c)
        spark_cluster.be_ready()
        known = spark_cluster.environment(CUSTODY_DATABASE=database_url)
        code, said = finish([sys.executable, script], tmp_path, known)
        assert code == 0, said[-3000:]
        assert outputs(c) == [2 * n + 1 for n in range(20)]
