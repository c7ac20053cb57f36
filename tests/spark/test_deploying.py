"""A pipeline's file on a cluster whose executors have no Custody, through both doors; and what executors may lack."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.error import HTTPError

import psycopg
import pytest
from tests.cli.conftest import COMMAND
from tests.spark import environments
from tests.spark.cluster import HOSTS, MASTER, SPARK, Cluster, free_port
from tests.waiting import wait_for

import custody
from custody.spark.environment import shipping
from custody.store import embedded

pytestmark = [pytest.mark.req("S5"), pytest.mark.timeout(600)]

SECRET = "only-deploying-knows-this"
FIRST, SECOND = HOSTS
MESSAGES = 400
RULES = """
def checked(number):
    if number < 0:
        raise ValueError(f"{number} is below zero")
    return number
"""
FRAUD = """
import os
import custody
from custody.spark import Pipeline

pipeline = Pipeline(
    source="orders",
    group="fraud",
    sink="screened",
    policy=custody.Policy(ordering="key", max_attempts=2, backoff=custody.Constant("50ms")),
)

@pipeline.each
def screen(message):
    import fraud_rules
    MORE
    return {
        "number": fraud_rules.checked(message.payload),
        "from": os.path.abspath(custody.__file__),
        "host": os.environ["SPARK_LOCAL_IP"],
    }

if __name__ == "__main__":
    print("done:", pipeline.run(drain="60s").done)
"""


@pytest.fixture(scope="module")
def without_custody(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environments.without_custody(tmp_path_factory.mktemp("environment") / "venv")


@pytest.fixture
def live(database_url: str) -> Iterator[custody.Custody]:
    with custody.connect(database_url) as opened:
        published(opened)
        yield opened


def published(c: custody.Custody) -> None:
    c.create_topic("orders", partitions=2)
    c.create_topic("screened", partitions=3)
    c.publish_many("orders", [custody.Outgoing(n, key=f"key {n % 20}") for n in range(MESSAGES)])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "fraud_rules.py").write_text(RULES)
    (tmp_path / "fraud.py").write_text(FRAUD.replace("MORE", "pass"))
    return tmp_path / "fraud.py"


def outputs(c: custody.Custody) -> list[dict[str, object]]:
    return [message.payload for partition in range(3) for message in c.read("screened", partition, max_messages=1000)]


def came_with_the_driver(c: custody.Custody, cluster: Cluster) -> None:
    """One output for each message, from both hosts, by the package that the driver sent."""
    found = outputs(c)
    assert sorted(int(str(one["number"])) for one in found) == list(range(MESSAGES))
    assert {one["host"] for one in found} == set(HOSTS)
    for one in found:
        assert str(one["from"]).startswith(str(cluster.place / f"worker-{one['host']}"))
        assert ".zip/custody/" in str(one["from"])


def run(command: list[str | Path], environment: dict[str, str], place: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=environment, cwd=place, capture_output=True, text=True, timeout=300, check=False)


def pipeline_run(cluster: Cluster) -> list[str | Path]:
    return [*COMMAND, "pipeline", "run", "fraud.py", "--master", cluster.url, "--drain", "60s", "--json"]


def refused(cluster: Cluster, place: Path, url: str, **environment: str) -> dict[str, str]:
    """The error of a run that is not even begun."""
    cluster.be_ready()
    done = run(pipeline_run(cluster), cluster.environment(CUSTODY_DATABASE=url, **environment), place)
    assert done.returncode == 1, done.stderr[-3000:]
    error: dict[str, str] = json.loads(done.stderr.splitlines()[-1])["error"]
    assert error["code"] == "pipeline_refused"
    return error


@contextmanager
def tcp_server(home: Path) -> Iterator[str]:
    """A PostgreSQL that listens on TCP and wants a password."""
    port = free_port()
    settings = {"listen_addresses": MASTER, "port": str(port), "fsync": "off"}
    with embedded.acquire(home, settings=settings) as server:
        with psycopg.connect(server.url, autocommit=True) as db:
            db.execute(f"ALTER USER postgres PASSWORD '{SECRET}'")
        yield f"postgresql://postgres:{SECRET}@{MASTER}:{port}/custody"


def connected(url: str) -> psycopg.Connection:
    return psycopg.connect(url, autocommit=True, application_name="test")


class Watch:
    """Looks at what a driver and its cluster show, as long as it runs."""

    def __init__(self, cluster: Cluster, page: int) -> None:
        self._places = {"master": cluster.page, "driver": f"http://{MASTER}:{page}"}
        self.seen: dict[str, str] = {}

    def look(self) -> bool:
        """Everything once; True when the driver shows its plans."""
        for path in ("/", "/json/"):
            self._get("master", path)
        applications = self._get("driver", "/api/v1/applications")
        for one in json.loads(applications) if applications.startswith("[") else []:
            at = f"/api/v1/applications/{one['id']}"
            for path in ("/environment/", "/jobs/", "/SQL/", "/StreamingQuery/", "/executors/"):
                self._get("driver", path)
            for path in ("/sql?details=true", "/environment", "/allexecutors", "/stages?details=true"):
                self._get("driver", at + path)
        self.seen["processes"] = "\n".join(_command_lines())
        return "custody" in self.seen.get("driver/StreamingQuery/", "") and "pyspark" in self.seen["processes"]

    def _get(self, place: str, path: str) -> str:
        try:
            with urllib.request.urlopen(self._places[place] + path, timeout=10) as answer:
                self.seen[place + path] = answer.read().decode()
        except (HTTPError, OSError):
            return ""  # it is not up yet
        return self.seen[place + path]


def _command_lines() -> Iterator[str]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                yield (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")


@pytest.mark.chaos
def test_a_file_by_the_command_line_and_its_password_nowhere(
    spark_cluster: Cluster, without_custody: Path, file: Path, tmp_path: Path
) -> None:
    """Executors without Custody, a database behind TCP and a password, and another file system than this machine's.

    The handlers wait until everything that can be seen of them has been looked at.
    """
    go = tmp_path / "go"
    wait = f"import time\n    while not os.path.exists({str(go)!r}): time.sleep(0.05)"
    file.write_text(FRAUD.replace("MORE", wait))
    (tmp_path / "events").mkdir()
    page = free_port()
    settings = {
        "spark.ui.enabled": "true",
        "spark.ui.port": str(page),
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": (tmp_path / "events").as_uri(),
        "spark.eventLog.compress": "false",
        "spark.hadoop.fs.defaultFS": f"hdfs://{MASTER}:9",  # where nobody is: nothing may be kept there
    }
    before = set(spark_cluster.place.rglob("*"))
    spark_cluster.be_ready()
    with tcp_server(tmp_path / "home") as url, custody.connect(url) as c, connected(url) as db:
        published(c)
        environment = spark_cluster.environment(
            settings, CUSTODY_DATABASE=url, CUSTODY_SPARK_LOG="info", PYSPARK_PYTHON=str(without_custody)
        )
        with _started(pipeline_run(spark_cluster), environment, tmp_path) as process:
            watch = Watch(spark_cluster, page)

            def shown() -> bool:
                assert process.poll() is None, (tmp_path / "stderr").read_text()[-4000:]
                # of each process that runs tasks: one by psycopg, and one by ADBC
                return watch.look() and _connections(db, "custody-task") == _connections(db, "custody-arrow") == len(
                    HOSTS
                )

            wait_for(shown, lambda: f"{watch.seen.keys()}\n{(tmp_path / 'stderr').read_text()[-3000:]}", 200)
            watch.look()
            workers = [pid for host in HOSTS for pid in spark_cluster.python_workers(host)]
            assert len(workers) >= len(HOSTS)
            go.touch()
            assert process.wait(200) == 0, (tmp_path / "stderr").read_text()[-4000:]
        (summary,) = json.loads((tmp_path / "stdout").read_text())["pipelines"]
        assert (summary["done"], summary["restarts"]) == (MESSAGES, 0)
        came_with_the_driver(c, spark_cluster)
    assert "MicroBatchExecution" in (tmp_path / "stderr").read_text(), "Spark says all that it has to say"
    for name, text in watch.seen.items():
        assert SECRET not in text, name
    logs = [path for path in set(spark_cluster.place.rglob("*")) - before if path.is_file() and path.suffix != ".zip"]
    assert any(path.name == "stderr" and path.stat().st_size for path in logs), "executors have logs"
    kept = [path for path in tmp_path.rglob("*") if path.is_file() and tmp_path / "home" not in path.parents]
    assert any("events" in str(path) for path in kept)
    for path in [*logs, *kept]:
        assert SECRET.encode() not in path.read_bytes(), path


def _connections(db: psycopg.Connection, name: str) -> int:
    row = db.execute(
        "SELECT count(*) FROM pg_stat_activity WHERE application_name = %s AND client_addr IS NOT NULL", [name]
    )
    ((count,),) = row.fetchall()
    return int(count)


@contextmanager
def _started(command: list[str | Path], environment: dict[str, str], place: Path) -> Iterator[subprocess.Popen[bytes]]:
    with (place / "stdout").open("wb") as out, (place / "stderr").open("wb") as err:
        process = subprocess.Popen(command, env=environment, cwd=place, stdout=out, stderr=err, start_new_session=True)
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)


def submitted(cluster: Cluster, file: Path, url: str, python: Path, *arguments: str, **environment: str) -> str:
    """What a file printed that spark-submit ran."""
    cluster.be_ready()
    done = run(
        [SPARK / "bin/spark-submit", "--master", cluster.url, *arguments, file],
        cluster.environment(
            CUSTODY_DATABASE=url, PYSPARK_PYTHON=str(python), PYSPARK_DRIVER_PYTHON=sys.executable, **environment
        ),
        file.parent,
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-1000:]}"
    return done.stdout


def packed(file: Path, *arguments: str) -> list[str]:
    """The arguments for spark-submit that `custody pipeline pack` tells."""
    done = run([*COMMAND, "pipeline", "pack", "fraud.py", *arguments, "--json"], dict(os.environ), file.parent)
    assert done.returncode == 0, done.stderr
    command: list[str] = json.loads(done.stdout)["command"]
    assert (command[:3], command[-1]) == (["spark-submit", "--master", "spark://HOST:7077"], "fraud.py")
    return command[3:-1]


@pytest.mark.slow
def test_a_packed_file_by_spark_submit(
    spark_cluster: Cluster, without_custody: Path, file: Path, live: custody.Custody
) -> None:
    assert "done: 400" in submitted(spark_cluster, file, live.database_url, without_custody, *packed(file))
    came_with_the_driver(live, spark_cluster)


@pytest.mark.long
def test_dependencies_by_spark_submit(
    spark_cluster: Cluster, file: Path, live: custody.Custody, tmp_path: Path
) -> None:
    """Executors with a bare Python. The source's process is on the driver's host, and finds them as that does."""
    python = environments.bare(tmp_path / "venv")
    arguments = packed(file, "--with-dependencies")
    here = os.path.dirname(os.path.dirname(psycopg.__file__))
    said = submitted(spark_cluster, file, live.database_url, python, *arguments, PYTHONPATH=here)
    assert "done: 400" in said
    came_with_the_driver(live, spark_cluster)


@pytest.mark.slow
def test_an_executor_that_does_not_reach_the_database(
    spark_cluster: Cluster, file: Path, live: custody.Custody
) -> None:
    """Its environment leads elsewhere, as another host's would: the socket is on the driver's machine only."""
    spark_cluster.be_ready()
    spark_cluster.kill_worker(SECOND)
    spark_cluster.start_worker(SECOND, PGHOSTADDR=MASTER, PGPORT=str(free_port()))
    try:
        error = refused(spark_cluster, file.parent, live.database_url)
    finally:
        spark_cluster.kill_worker(SECOND)
    assert f"the executor on {SECOND} cannot reach the database's Unix socket" in error["message"]
    assert "workers on other hosts need a TCP database URL" in error["message"]
    assert "CUSTODY_DATABASE=postgresql://" in error["remedy"]
    assert live.groups("orders") == [], "nothing was claimed, and no group made for it"


@pytest.mark.slow
def test_executors_that_lack_something(
    spark_cluster: Cluster, file: Path, live: custody.Custody, tmp_path: Path
) -> None:
    bare = environments.bare(tmp_path / "venv")
    error = refused(spark_cluster, file.parent, live.database_url, PYSPARK_PYTHON=str(bare))
    assert f"the executor on {FIRST} has no adbc_driver_manager, " in error["message"]
    assert "--with-dependencies" in error["remedy"]
    error = refused(spark_cluster, file.parent, live.database_url, PYSPARK_PYTHON=str(tmp_path / "python"))
    assert f"there is no Python '{tmp_path / 'python'}' on 127.0.0." in error["message"]
    assert live.groups("orders") == []


@pytest.mark.slow
def test_executors_with_another_python(
    spark_cluster: Cluster, file: Path, live: custody.Custody, tmp_path: Path
) -> None:
    other = another_python()
    if other is None:
        pytest.skip("there is no other Python here; tests/spark/test_probe.py judges what Spark says of one")
    error = refused(spark_cluster, file.parent, live.database_url, PYSPARK_PYTHON=other)
    assert "runs Python 3." in error["message"]
    assert f"this driver 3.{sys.version_info.minor}" in error["message"]
    assert f"a Python 3.{sys.version_info.minor} that every worker has" in error["remedy"]


def another_python() -> str | None:
    """A Python that runs, of another version than this one."""
    for minor in (10, 11, 12, 13, 14):
        names = [f"python3.{minor}", *map(str, Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/python3"))]
        for name in names if minor != sys.version_info.minor else []:
            found = shutil.which(name)
            asked = found and subprocess.run(
                [found, "-c", "import sys; print(sys.version_info[1])"], capture_output=True
            )
            if asked and asked.stdout.strip() == str(minor).encode():
                return found
    return None


def test_the_package_runs_out_of_its_zip(without_custody: Path, tmp_path: Path) -> None:
    """Also as a driver, which then packs itself again."""
    with (tmp_path / "custody.zip").open("wb") as file:
        shipping.write(file, shipping.files())
    code = (
        "import custody, pyspark_custody, sys\n"
        "from custody.spark.environment import shipping\n"
        "from custody.store.functions import functions\n"
        "with open('again.zip', 'wb') as file: shipping.write(file, shipping.files())\n"
        "print(custody.__file__, len(functions()[0]) > 10_000)\n"
    )
    done = subprocess.run(
        [without_custody, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "custody.zip")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(tmp_path / "custody.zip/custody/__init__.py"), "True"]
    assert (tmp_path / "again.zip").read_bytes() == (tmp_path / "custody.zip").read_bytes()
