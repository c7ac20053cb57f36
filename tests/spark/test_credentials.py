"""The password of the database reaches executors, and nobody else: no plan, no page, no checkpoint, no log has it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import psycopg
import pytest

import custody

SECRET = "only-credentials-know-this"  # another than other files have: some look at the processes of the whole machine
DRIVER = f"""
import os, sys, urllib.request
import custody
from custody.spark import Jdbc, Pipeline
from custody.spark.session import session

directory = sys.argv[1]
spark = session(
    master="local[2,4]",
    config={{"spark.eventLog.enabled": "true", "spark.eventLog.dir": directory + "/events",
            "spark.eventLog.compress": "false", "spark.ui.enabled": "true", "spark.ui.port": "0"}},
)
rows = Jdbc(os.environ["CUSTODY_DATABASE"], "rows")
pipeline = Pipeline(source="in", group="g", sink=["out", rows], schema="n int")
pipeline.frame(lambda frame: frame.select("_partition", "_offset", "_key", "n"))
with custody.connect(os.environ["CUSTODY_DATABASE"]) as c:
    assert pipeline.run(c, spark=spark, available_now=True, checkpoint=directory + "/checkpoint").done == 5
pages = spark.sparkContext.uiWebUrl
ids = "/api/v1/applications/" + spark.sparkContext.applicationId
for page in ("/environment/", "/SQL/", "/jobs/", "/StreamingQuery/", ids + "/sql?details=true", ids + "/environment"):
    with urllib.request.urlopen(pages + page) as answer:
        assert "{SECRET}" not in answer.read().decode(), page
spark.stop()
"""


@pytest.mark.slow  # test_deploying.py looks into the same places on a cluster
@pytest.mark.req("S5")
def test_a_password_appears_nowhere(database_url: str, tmp_path: Path) -> None:
    parts = urlsplit(database_url)
    url = urlunsplit(parts._replace(netloc=f"{parts.username or 'postgres'}:{SECRET}@{parts.hostname or ''}"))
    with custody.connect(url) as c:
        c.create_topic("in")
        c.create_topic("out")
        c.publish_many("in", [{"n": n} for n in range(5)])
    with psycopg.connect(url, autocommit=True) as db:
        db.execute("CREATE TABLE rows (n int)")
    (tmp_path / "events").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={**os.environ, "CUSTODY_DATABASE": url, "CUSTODY_SPARK_LOG": "info"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "MicroBatchExecution" in done.stderr, "Spark says all that it has to say"
    assert SECRET not in done.stdout + done.stderr
    with psycopg.connect(url) as db:
        assert db.execute("SELECT count(*) FROM rows").fetchone() == (5,)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any("events" in str(path) for path in files)
    assert any("offsets" in str(path) for path in files)
    for path in files:
        assert SECRET.encode() not in path.read_bytes(), path
