"""A standalone Spark cluster of real processes on this machine: a master, and workers that Spark takes for hosts.

Each is the head of a session of its own, which its executors and their Python workers never leave: so one can be killed
as a host dies, with all that runs on it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyspark
from tests import jvm
from tests.spark.drivers import in_session
from tests.waiting import wait_for

from custody.spark.environment import java

SPARK = Path(pyspark.__file__).parent
MASTER = "127.0.0.1"
HOSTS = ("127.0.0.1", "127.0.0.2")
STARTED = 90.0
"""Seconds that a JVM may take to be there on a busy machine."""
SETTINGS = {
    "spark.executor.memory": "512m",
    "spark.executor.extraJavaOptions": jvm.FLAGS,
    "spark.driver.memory": "512m",
    "spark.ui.enabled": "false",
    "spark.sql.shuffle.partitions": "2",
}
"""What an administrator writes into spark-defaults.conf."""


def free_port(host: str = MASTER) -> int:
    with socket.socket() as bound:
        bound.bind((host, 0))
        return int(bound.getsockname()[1])


class Daemon:
    """A process of the cluster, with everything that it starts."""

    def __init__(self, place: Path, name: str, command: list[str], environment: Mapping[str, str]) -> None:
        self.log = place / f"{name}.log"
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                [str(SPARK / "bin/spark-class"), *command],
                cwd=place,
                env={**_clean(), **environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def processes(self) -> list[int]:
        return list(in_session(self.process.pid))

    def kill(self) -> None:
        """kill -9 of all of it; returns when nothing of it is left."""
        while self.process.poll() is None or self.processes():
            for pid in self.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(0.05)


class Cluster:
    """A master with a worker on each of the hosts, of one core each."""

    def __init__(self, place: Path, hosts: Sequence[str] = HOSTS) -> None:
        self.place, self._hosts = place, hosts
        self._port, self._page_port = free_port(), free_port()
        self.url = f"spark://{MASTER}:{self._port}"
        self.page = f"http://{MASTER}:{self._page_port}"
        self.workers: dict[str, Daemon] = {}
        self._master: Daemon | None = None

    def be_ready(self) -> None:
        """Starts whoever is missing, and waits until all are registered and no earlier application has their cores."""
        if self._master is None:
            self.start_master()
        for host in self._hosts:
            if host not in self.workers:
                self.start_worker(host)

        def idle() -> bool:
            state = self.state()
            alive = [worker for worker in state.get("workers", []) if worker["state"] == "ALIVE"]
            return (
                len(alive) == len(self._hosts)
                and state["status"] == "ALIVE"
                and not any(one["coresused"] for one in alive)
            )

        wait_for(idle, self.story, STARTED)

    def has_workers(self) -> None:
        """Until the application that runs has an executor on each host again."""
        for host in self._hosts:
            if host not in self.workers:
                self.start_worker(host)
        wait_for(lambda: self.state().get("coresused") == len(self._hosts), self.story, STARTED)

    def start_master(self) -> None:
        """Also after its death: it knows workers and applications from its directory, and tells them where it is."""
        (self.place / "recovery").mkdir(exist_ok=True)
        options = f"-Dspark.deploy.recoveryMode=FILESYSTEM -Dspark.deploy.recoveryDirectory={self.place / 'recovery'}"
        command = ["org.apache.spark.deploy.master.Master", "--host", MASTER, "--port", str(self._port)]
        self._master = Daemon(
            self.place,
            "master",
            [*command, "--webui-port", str(self._page_port)],
            {"SPARK_LOCAL_IP": MASTER, "SPARK_DAEMON_JAVA_OPTS": f"{options} {jvm.FLAGS}"},
        )

    def start_worker(self, host: str, **environment: str) -> None:
        place = self.place / f"worker-{host}"
        place.mkdir(exist_ok=True)
        command = ["org.apache.spark.deploy.worker.Worker", "--host", host, "--webui-port", "0", "--cores", "1"]
        self.workers[host] = Daemon(
            place,
            "worker",
            [*command, "--memory", "1g", "--work-dir", str(place / "work"), self.url],
            {"SPARK_LOCAL_IP": host, "SPARK_DAEMON_JAVA_OPTS": jvm.FLAGS, "TMPDIR": str(place), **environment},
        )

    def kill_master(self) -> None:
        assert self._master is not None
        self._master.kill()
        self._master = None

    def kill_worker(self, host: str) -> None:
        self.workers.pop(host).kill()

    def state(self) -> dict[str, Any]:
        """The master's page; nothing while it does not answer."""
        try:
            with urllib.request.urlopen(f"{self.page}/json/", timeout=5) as answer:
                found: dict[str, Any] = json.load(answer)
        except (OSError, ValueError):
            return {}
        return found

    def python_workers(self, host: str) -> list[int]:
        """The Python processes that run tasks on a host: the workers, without the daemon that forks them."""
        return [pid for pid in self.workers[host].processes() if _is_python_worker(pid)]

    def environment(self, settings: Mapping[str, str] | None = None, **more: str) -> dict[str, str]:
        """For a driver: everything on loopback, and the settings as its spark-defaults.conf."""
        directory = Path(tempfile.mkdtemp(dir=self.place, prefix="conf-"))
        lines = "".join(f"{name} {value}\n" for name, value in {**SETTINGS, **(settings or {})}.items())
        (directory / "spark-defaults.conf").write_text(lines)
        return {**_clean(), "SPARK_LOCAL_IP": MASTER, "SPARK_CONF_DIR": str(directory), **more}

    def story(self) -> str:
        logs = [self.place / "master.log", *self.place.glob("worker-*/worker.log")]
        return "\n".join([json.dumps(self.state())[:2000], *(log.read_text()[-2000:] for log in logs)])

    def close(self) -> None:
        for daemon in [*self.workers.values(), *([] if self._master is None else [self._master])]:
            daemon.kill()


def _clean() -> dict[str, str]:
    """An environment without settings of Spark, and with the Java that it needs."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SPARK", "PYSPARK", "JAVA", "CUSTODY")) and name not in ("PYTHONPATH", "PYTHONWARNINGS")
    }
    return {**kept, **jvm.variables(), "JAVA_HOME": str(java.find().home), "SPARK_HOME": str(SPARK)}


def _is_python_worker(pid: int) -> bool:
    """A fork of the daemon: its parent has the same command line."""
    with contextlib.suppress(OSError, IndexError):
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        line = Path(f"/proc/{pid}/cmdline").read_bytes()
        return b"pyspark" in line and b"daemon" in line and Path(f"/proc/{stat[1]}/cmdline").read_bytes() == line
    return False


@contextlib.contextmanager
def cluster(place: Path, hosts: Sequence[str] = HOSTS) -> Iterator[Cluster]:
    """A cluster that is ready, and gone at the end."""
    made = Cluster(place, hosts)
    try:
        made.be_ready()
        yield made
    finally:
        made.close()
