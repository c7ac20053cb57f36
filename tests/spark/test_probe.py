"""What is said of executors that cannot do a pipeline's work."""

from __future__ import annotations

import sys

import pytest
from pyspark.sql import SparkSession

from custody.errors import PipelineRefused
from custody.spark.database.reach import by_socket
from custody.spark.environment import probe
from custody.spark.environment.probe import Answer, cannot_run, judged

pytestmark = pytest.mark.req("S5")

HERE = sys.version_info[:2]
TCP = "postgresql://user@db.example/custody"
SOCKET = "postgresql://user@/custody?host=/run/custody"


def answer(host: str = "a", **lacks: object) -> Answer:
    return Answer(**{"host": host, "place": f"{host}:/work", "python": HERE, **lacks})  # type: ignore[arg-type]


def test_executors_that_lack_nothing_are_not_refused() -> None:
    assert judged([answer("a"), answer("b")], SOCKET) is None


@pytest.mark.parametrize(
    ("lacks", "url", "message", "remedy"),
    [
        ({"python": (3, 9)}, TCP, f"b runs Python 3.9, but this driver 3.{HERE[1]}", "PYSPARK_PYTHON"),
        ({"missing": ("msgspec", "yaml")}, TCP, "b has no msgspec, yaml", "--with-dependencies"),
        ({"broken": "psycopg: no libpq"}, TCP, "cannot be imported on b: psycopg: no libpq", ""),
        ({"unreached": "no route"}, TCP, "b cannot reach the database, but this driver can: no route", "pg_hba.conf"),
        (
            {"unreached": "no such file"},
            SOCKET,
            "workers on other hosts need a TCP database URL",
            "CUSTODY_DATABASE=postgresql://user@host/database",
        ),
    ],
)
def test_the_host_the_reason_and_what_to_do(lacks: dict[str, object], url: str, message: str, remedy: str) -> None:
    found = judged([answer("a"), answer("b", **lacks)], url)
    assert isinstance(found, PipelineRefused)
    assert message in str(found)
    assert remedy in (found.remedy or "")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "Lost task 0.3 in stage 0.0 (TID 3) (10.0.0.7 executor 1): org.apache.spark.api.python.PythonException: "
            "pyspark.errors.exceptions.base.PySparkRuntimeException: [PYTHON_VERSION_MISMATCH] Python in worker has "
            "different version: 3.12 than that in driver: 3.11, PySpark cannot run with different minor versions.",
            "the executor on 10.0.0.7 runs Python 3.12, but this driver 3.11",
        ),
        (
            "Lost task 1.3 in stage 0.0 (TID 7) (host-b executor 0): java.io.IOException: Cannot run program "
            '"/opt/python": error=2, No such file or directory',
            "there is no Python '/opt/python' on host-b",
        ),
    ],
)
def test_a_python_that_does_not_run(text: str, message: str) -> None:
    assert message in str(cannot_run(RuntimeError(text), ["a", "b"]))
    _, _, reason = text.partition("): ")
    assert "one of a, b" in str(cannot_run(RuntimeError(reason), ["b", "a", "b"]))


def test_the_answer_of_an_executor(spark: SparkSession, database_url: str) -> None:
    """Here it has everything; and of a package or a database that is not there it says so."""
    (found,) = (Answer(**one) for one in probe._answer([], url=database_url, packages=probe.PACKAGES, held=0.0))
    assert (found.python, found.missing, found.broken, found.unreached) == (HERE, (), None, None)
    (found,) = (Answer(**one) for one in probe._answer([], url=database_url, packages=["no_such_thing"], held=0.0))
    assert found.missing == ("no_such_thing",)
    nowhere = "postgresql://user@127.0.0.1:9/custody"
    (found,) = (Answer(**one) for one in probe._answer([], url=nowhere, packages=[], held=0.0))
    assert "127.0.0.1" in (found.unreached or "")


def test_sockets_and_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PGHOST", "PGHOSTADDR"):
        monkeypatch.delenv(name, raising=False)
    assert by_socket(SOCKET)
    assert by_socket("postgresql:///custody")
    assert not by_socket(TCP)
    monkeypatch.setenv("PGHOST", "db.example")
    assert not by_socket("postgresql:///custody")
