"""A SparkSession that was made without Custody: the same results whatever it is set to, and it is left as it was."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.spark.programs import QUICK, environment
from tests.spark.test_source import with_password

import custody

DRIVER = """
import json, os, sys
from pathlib import Path
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
import custody
from custody.spark import Pipeline, fail_when

url, directory, given = sys.argv[1:]
builder = SparkSession.builder.master("local[2]")
for name, value in json.loads(given).items():
    builder = builder.config(name, value)
spark = builder.getOrCreate()
policy = custody.Policy(ordering="key", max_attempts=1)


def settings():
    return {row.key: row.value for row in spark.sql("SET").collect()}


def rate():
    return spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 1).load()


before, active = settings(), SparkSession.getActiveSession()
beside = rate().writeStream.format("noop").option("checkpointLocation", directory + "/beside")
beside = beside.trigger(processingTime="5 seconds").start()
said = {"results": []}
with custody.connect(url) as c:
    singly = Pipeline(source="in", group="singly", sink="out", policy=policy, schema="n int, at timestamp")

    @singly.each
    def handle(message):
        if message.payload["n"] == 4:
            os._exit(1)  # plain local[2] tries no task again
        return {**message.payload, "published": message.published_at.utcoffset().total_seconds()}

    framed = Pipeline(
        source="in", group="framed", sink="out", policy=policy,
        schema="n int, at timestamp, local timestamp, day date, price decimal(10,2), text string",
    )

    @framed.frame
    def transform(frame):
        names = spark.createDataFrame([(n, f"name {n}") for n in range(12)], "n int, name string")
        return (
            frame.join(names.hint("merge"), "n")  # shuffles
            .withColumn("age", F.unix_timestamp("_published_at") - F.unix_timestamp("at") < 0)
            .transform(fail_when(F.col("n") == 5, "five"))
        )

    for pipeline in (singly, framed):
        summary = pipeline.run(c, spark=spark, drain="60s")
        said["results"].append([summary.done, summary.dead, summary.outputs, summary.restarts])

    twins = Pipeline(source="twins", group="g", sink="out", schema="a int, A int")
    twins.frame(lambda frame: frame)
    try:
        said["twins"] = twins.run(c, spark=spark, available_now=True).done
    except custody.CustodyError as error:
        said["twins"] = str(error)

said["active"] = beside.isActive and SparkSession.getActiveSession() is active and spark.range(3).count() == 3
beside.stop()
after = settings()
said["changed"] = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
said["changed"] = sorted(said["changed"])
spark.stop()
Path(directory, "said.json").write_text(json.dumps(said))
"""
PLAIN = {name: QUICK[name] for name in ("spark.ui.enabled", "spark.python.daemon.module")}
CONTRARY = {
    **PLAIN,
    "spark.sql.execution.arrow.pyspark.enabled": "false",
    "spark.sql.ansi.enabled": "false",
    "spark.sql.session.timeZone": "America/New_York",
    "spark.sql.caseSensitive": "true",
    "spark.sql.execution.arrow.useLargeVarTypes": "true",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.shuffle.partitions": "5",
}
PAYLOAD = {
    "at": "2030-06-01T12:00:00+02:00",
    "local": "2030-06-01T12:00:00",
    "day": "2030-06-01",
    "price": 1.5,
    "text": "tea",
}


def run(program: str, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=environment(**more),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


@pytest.mark.req("S5")
@pytest.mark.parametrize(
    "given",
    [
        pytest.param(PLAIN, id="plain", marks=pytest.mark.slow),
        pytest.param(CONTRARY, id="contrary", marks=pytest.mark.slow),
    ],
)
def test_results_are_the_same_and_the_session_is_left_as_it_was(
    given: dict[str, str], database_url: str, tmp_path: Path
) -> None:
    url = with_password(database_url)
    with custody.connect(url) as c:
        c.create_topic("in", partitions=2)
        c.create_topic("out")
        c.create_topic("twins")
        c.publish_many("in", [custody.Outgoing({"n": n, **PAYLOAD}, key=f"k{n}") for n in range(8)])
        c.publish("twins", {"a": 1, "A": 2}, key="k")
        done = run(DRIVER, url, str(tmp_path), json.dumps(given))
        assert done.returncode == 0, done.stderr[-3000:]
        said = json.loads((tmp_path / "said.json").read_text())
        assert said["results"] == [[7, 1, 7, 0], [7, 1, 7, 0]]
        assert (said["active"], said["changed"]) == (True, [])
        out = [message.payload for message in c.read("out", 0)]
        assert [letter.payload["n"] for group in ("singly", "framed") for letter in c.dead("in", group)] == [4, 5]
    expected: list[dict[str, Any]] = [
        {"n": n, "at": PAYLOAD["at"], "published": 0.0} for n in (0, 1, 2, 3, 5, 6, 7)
    ] + [
        {"n": n, "name": f"name {n}", "age": True, **PAYLOAD, "at": "2030-06-01T10:00:00.000Z",
         "local": "2030-06-01T12:00:00.000Z"} for n in (0, 1, 2, 3, 4, 6, 7)
    ]  # fmt: skip
    if given is CONTRARY:
        assert said["twins"] == 1
        expected.append({"a": 1, "A": 2})
    else:
        assert "spark.sql.caseSensitive" in said["twins"]
    assert sorted(map(by_name, out)) == sorted(map(by_name, expected))


def by_name(payload: dict[str, Any]) -> str:
    return json.dumps(payload, sort_keys=True)


ANOTHER_PYTHON = """
import sys
from pyspark.sql import SparkSession
import custody
from custody.spark import Pipeline

spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
pipeline = Pipeline(source="in", group="g")
pipeline.each(lambda message: None)
with custody.connect(sys.argv[1]) as c:
    c.create_topic("in")
    for given in (spark, None):
        try:
            pipeline.run(c, spark=given, available_now=True)
        except custody.CustodyError as error:
            print(error)
    print([group.name for group in c.groups("in")])
spark.stop()
"""


@pytest.mark.chaos
@pytest.mark.req("S5")
def test_workers_without_custody_are_noticed_before_anything_is_claimed(database_url: str, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    # the same interpreter without its packages: -S leaves out site, and so the environment's packages
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    bare.chmod(0o755)
    done = run(ANOTHER_PYTHON, database_url, PYSPARK_PYTHON=str(bare))
    assert done.returncode == 0, done.stderr[-3000:]
    refused = f"the Python of Spark's workers, {str(bare)!r}, cannot run Custody: ModuleNotFoundError"
    assert done.stdout.count(refused) == done.stdout.count("os.environ['PYSPARK_PYTHON'] = sys.executable") == 2
    assert done.stdout.endswith("[]\n"), "no group was made"
