"""Spark Connect: the plain source and sink work through it; a pipeline is refused at once."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.spark.programs import connect_server, documented, environment
from tests.spark.test_source import assert_hidden, with_password

import custody

REDACTED = r"postgres(ql)?://[^\s\"]+"
"""Without it Spark writes each request of a client to its event log, options and all."""
CLIENT = """
import json, sys
from pathlib import Path
import custody
from custody.spark import Pipeline
from custody.spark.session import session

url, directory = sys.argv[1:]
said = {}

# the database is the server's: a client needs no credentials
late.explain()
said["views"] = spark.read.format("custody").option("table", "dead_letters").load().count()
frame = spark.createDataFrame([("k", "1"), ("k", "2")], "key string, payload string")
frame.write.format("custody").option("topic", "copies").mode("append").save()

# or it is given
for _ in range(2):
    stream = spark.readStream.format("custody").option("url", url).option("topic", "orders").load()
    query = (
        stream.select("key", "payload", "payload_kind")
        .writeStream.format("custody")
        .option("url", url)
        .option("topic", "copies")
        .option("checkpointLocation", directory + "/checkpoint")
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()

pipeline = Pipeline(source="orders", group="g", sink="copies")
pipeline.each(lambda message: message.payload)
said["refused"] = []
with custody.connect(url) as c:
    for attempt in (
        lambda: pipeline.run(c, spark=spark, available_now=True),
        lambda: pipeline.run(c, available_now=True),
        lambda: pipeline.try_out(c, spark=spark),
        lambda: session(),
    ):
        try:
            attempt()
        except custody.CustodyError as error:
            said["refused"].append([error.code, str(error)])
    said["groups"] = [group.name for group in c.groups("orders")]
spark.stop()
Path(directory, "said.json").write_text(json.dumps(said))
"""


@pytest.fixture
def server(database_url: str, tmp_path: Path) -> Iterator[str]:
    """The address of a server that knows the database and writes down what it is asked."""
    (tmp_path / "events").mkdir()
    log = {
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": (tmp_path / "events").as_uri(),
        "spark.eventLog.compress": "false",
        "spark.redaction.string.regex": REDACTED,
        "spark.log.level": "INFO",
    }
    with connect_server(tmp_path, with_password(database_url), log) as address:
        yield address


@pytest.mark.req("S5")
@pytest.mark.slow
def test_the_source_and_the_sink_work_through_connect_and_pipelines_are_refused(
    server: str, database_url: str, tmp_path: Path
) -> None:
    with custody.connect(database_url) as c:
        for topic in ("orders", "copies"):
            c.create_topic(topic, partitions=2)
        c.publish_many(
            "orders", [custody.Outgoing({"n": n}, partition=n % 2, key=f"k{n}", allow_split=True) for n in range(12)]
        )
        url = with_password(database_url)
        program = documented("connect.py").replace("sc://spark.example:15002", server) + CLIENT
        done = subprocess.run(
            [sys.executable, "-c", program, url, str(tmp_path)],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        said = json.loads((tmp_path / "said.json").read_text())
        assert said["views"] == 0
        assert done.stdout.startswith("3\n")
        assert "BatchScan custody" in done.stdout
        assert "Filter (" not in done.stdout, "filters are pushed down"
        copies = [message.payload for p in range(2) for message in c.read("copies", p)]
        assert sorted(copies, key=str) == sorted([1, 2, *({"n": n} for n in range(12))], key=str), "each once"
    assert [code for code, _ in said["refused"]] == ["pipeline_refused"] * 4
    assert all("custody pipeline run, spark-submit" in text for _, text in said["refused"])
    assert said["groups"] == [], "nothing was begun"
    assert any((tmp_path / "events").rglob("events_*"))
    assert_hidden(url, done.stdout + done.stderr, tmp_path)
