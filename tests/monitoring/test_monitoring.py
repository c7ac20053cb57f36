"""Metrics and health of workers and relays: what Prometheus and an orchestrator see on ports of their own."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from prometheus_client.parser import text_string_to_metric_families
from psycopg import sql
from tests.cli.conftest import Run, environment, quick, start  # noqa: F401  # as fixtures
from tests.waiting import wait_for

import custody
from custody import Constant, Custody, Dead, Outgoing, Policy
from custody.errors import InvalidArgument
from custody.monitoring import Health, answering
from custody.monitoring.exposition import of_relay, of_workers, page
from custody.monitoring.listening import AT_ONCE, health_page
from custody.outbox import write
from custody.relay import Relay
from custody.worker import Worker

pytestmark = [pytest.mark.core, pytest.mark.req("G18")]

HANDLERS = """
import custody

def handle(message):
    if message.payload == "poison":
        raise custody.Dead("poison")
    if message.payload == "flaky" and message.attempt == 1:
        raise ValueError("not yet")
"""


LABELS = ("topic", "group", "outcome", "le")


def nothing(_: custody.Message) -> None: ...


def get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=15) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def values(text: str) -> dict[tuple[str, ...], float]:
    """Each sample by its name and the values of its labels."""
    return {
        (sample.name, *(sample.labels[name] for name in LABELS if name in sample.labels)): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.fixture
def orders(c: Custody) -> Custody:
    c.create_topic("orders")
    c.create_group("orders", "stock", Policy(max_attempts=3, backoff=Constant("0s")))
    return c


def listening(process: subprocess.Popen[str]) -> list[str]:
    """The addresses that the command names on stderr, up to the line that says that it works."""
    assert process.stderr is not None
    found: list[str] = []
    for line in process.stderr:
        found += re.findall(r"http://\S+", line)
        if "working on" in line or "relaying as" in line:
            return found
    raise AssertionError(f"it did not start: {found}")


def test_a_worker_shows_its_metrics_and_its_health(start, database_url: str, tmp_path: Path, orders: Custody) -> None:  # noqa: F811
    (tmp_path / "handlers.py").write_text(HANDLERS)
    orders.publish_many("orders", [Outgoing(one) for one in ["fine", "flaky", "poison", "fine"]])
    process = start(
        "work", "handlers:handle", "-t", "orders", "-g", "stock", "--metrics-port", "0", "--health-port", "0",
    )  # fmt: skip
    (address,) = listening(process)
    assert address.startswith("http://127.0.0.1:")
    wait_for(lambda: orders.stats("orders", "stock").depth == 0, "everything is handled")
    group = ("orders", "stock")
    wait_for(
        lambda: values(get(f"{address}/metrics")[1])[("custody_messages_settled_total", *group, "ack")] == 3,
        "the last one is counted",
    )
    found = values(get(f"{address}/metrics")[1])
    expected = {
        ("custody_messages_received_total", *group): 5,
        ("custody_messages_redelivered_total", *group): 1,
        ("custody_messages_settled_total", *group, "nack"): 1,
        ("custody_messages_settled_total", *group, "dead"): 1,
        ("custody_messages_dead_total", *group): 1,
        ("custody_worker_in_flight", *group): 0,
        ("custody_worker_handlers_running", *group): 0,
        ("custody_worker_leases_lost_total", *group): 0,
        ("custody_worker_handling_seconds_count", *group): 5,
        ("custody_worker_overdue_seconds", *group): 0,
    }
    assert {name: found[name] for name in expected} == expected
    assert found[("custody_worker_handling_seconds_bucket", *group, "+Inf")] == 5
    assert found["custody_worker_last_claim_timestamp_seconds", *group] > 1.7e9
    assert ("process_resident_memory_bytes",) in found
    assert get(f"{address}/healthz") == (200, '{"status":"ok"}')
    assert get(f"{address}/readyz") == (200, '{"status":"ready"}')
    status, body = get(f"{address}/nothing")
    assert (status, json.loads(body)["error"]["code"]) == (404, "no_such_path")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 0


@contextmanager
def monitored(worker: Worker, c: Custody, *, stalled_after: float) -> Iterator[str]:
    health = Health(
        {"orders/stock": worker.vitals},
        ping=c.ping,
        stopping=lambda: worker.stopping,
        stalled_after=stalled_after,
    )
    pages = {
        "/healthz": health_page(health.require_alive, "ok"),
        "/readyz": health_page(health.require_ready, "ready"),
        "/metrics": lambda: page(lambda: of_workers({"orders/stock": worker})),
    }
    with answering("127.0.0.1", 0, pages) as port:
        yield f"http://127.0.0.1:{port}"


@contextmanager
def run(worker: Worker) -> Iterator[None]:
    thread = threading.Thread(target=worker.run)
    thread.start()
    try:
        yield
    finally:
        worker.stop()
        thread.join(20)
        assert not thread.is_alive()


class Hanging:
    """Custody whose claims do not come back until they may."""

    def __init__(self, c: Custody) -> None:
        self._c, self.hangs, self.goes_on = c, threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._c, name)

    def claim(self, *given: Any, **settings: Any) -> Any:
        if self.hangs.is_set():
            assert self.goes_on.wait(20)
        return self._c.claim(*given, **settings)


def test_a_worker_that_hangs_is_not_alive(orders: Custody) -> None:
    hanging: Any = Hanging(orders)
    worker = Worker(hanging, "orders", "stock", nothing, poll="20ms")
    with monitored(worker, orders, stalled_after=0.3) as address, run(worker):
        assert get(f"{address}/healthz")[0] == 200
        hanging.hangs.set()
        status, body = wait_for(
            lambda: (answer := get(f"{address}/healthz"))[0] != 200 and answer, "it is found to hang"
        )
        error = json.loads(body)["error"]
        assert (status, error["code"]) == (503, "stalled")
        assert error["message"].startswith("orders/stock: claiming has not gone on for ")
        assert json.loads(get(f"{address}/readyz")[1])["error"]["code"] == "stalled"
        hanging.goes_on.set()
        wait_for(lambda: get(f"{address}/healthz")[0] == 200, "it goes on")


def test_a_thread_that_died_is_not_alive(orders: Custody, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = orders.worker_for("orders", "stock", nothing, poll="20ms", visibility_timeout="60ms")
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    monkeypatch.setattr(worker, "_give_up_stuck", lambda: 1 / 0)
    with monitored(worker, orders, stalled_after=3600) as address, run(worker):
        body = wait_for(lambda: (answer := get(f"{address}/healthz"))[0] == 503 and answer[1], "it is found dead")
    assert "the thread for extending leases has died" in body


def test_a_long_handler_is_alive_and_its_age_is_shown(orders: Custody) -> None:
    begun, ends = threading.Event(), threading.Event()

    def handle(_: custody.Message) -> None:
        begun.set()
        assert ends.wait(20)

    orders.publish("orders", 1)
    worker = orders.worker_for("orders", "stock", handle, poll="20ms", concurrency=1)
    group = ("orders", "stock")
    with monitored(worker, orders, stalled_after=0.3) as address, run(worker):
        assert begun.wait(20)
        wait_for(
            lambda: values(get(f"{address}/metrics")[1])[("custody_worker_oldest_handler_seconds", *group)] > 0.4,
            "it is shown",
        )
        found = values(get(f"{address}/metrics")[1])
        assert found["custody_worker_handlers_running", *group] == found["custody_worker_in_flight", *group] == 1
        assert get(f"{address}/healthz")[0] == 200
        ends.set()


def test_a_lease_that_is_lost_is_counted(orders: Custody) -> None:
    begun, ends = threading.Event(), threading.Event()

    def handle(_: custody.Message) -> None:
        begun.set()
        assert ends.wait(20)

    orders.publish("orders", 1)
    worker = orders.worker_for("orders", "stock", handle, poll="20ms")
    group = ("orders", "stock")
    with monitored(worker, orders, stalled_after=60) as address, run(worker):
        assert begun.wait(20)
        orders.pause("orders", "stock")
        orders.rewind("orders", "stock", to_offset=0)
        ends.set()
        wait_for(
            lambda: values(get(f"{address}/metrics")[1])[("custody_worker_leases_lost_total", *group)] == 1, "counted"
        )
        assert values(get(f"{address}/metrics")[1])["custody_worker_outcomes_lost_total", *group] == 1


@pytest.mark.own_database
def test_a_database_that_is_down_makes_it_unready_and_not_dead(
    server_url: str, orders: Custody, database_url: str
) -> None:
    worker = orders.worker_for("orders", "stock", nothing, poll="20ms")
    name = str(psycopg.conninfo.conninfo_to_dict(database_url)["dbname"])
    allow = sql.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS {}")
    with (
        psycopg.connect(server_url, autocommit=True) as admin,
        monitored(worker, orders, stalled_after=30) as address,
        run(worker),
    ):
        wait_for(lambda: get(f"{address}/readyz")[0] == 200, "it is ready")
        admin.execute(allow.format(sql.Identifier(name), False))
        try:
            admin.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s",
                [name],
            )
            body = wait_for(lambda: (answer := get(f"{address}/readyz"))[0] == 503 and answer[1], "it is unready")
            assert json.loads(body)["error"]["code"] == "database_unavailable"
            assert get(f"{address}/healthz")[0] == 200
        finally:
            admin.execute(allow.format(sql.Identifier(name), True))
        wait_for(lambda: get(f"{address}/readyz")[0] == 200, "it is ready again")


def test_a_worker_that_stops_is_unready(orders: Custody) -> None:
    worker = orders.worker_for("orders", "stock", nothing)
    worker.stop()
    with monitored(worker, orders, stalled_after=30) as address:
        status, body = get(f"{address}/readyz")
        assert (status, json.loads(body)["error"]["code"]) == (503, "stopping")
        assert get(f"{address}/healthz")[0] == 200


def test_a_relay_shows_its_metrics(c: Custody, db: psycopg.Connection[Any]) -> None:
    with db.transaction():
        for number in range(3):
            write(db, event_type="made", payload=number, destination="mine:")

    def publish(event: Any) -> None:
        if event.attempts == 0 and json.loads(event.data) == 1:
            raise Dead("no")

    relay = Relay(c, {"mine": publish}, max_attempts=1, retry_for="0s")
    assert relay.drain(timeout="20s").published == 2
    found = values(page(lambda: of_relay(relay))[0].decode())
    assert (found["custody_relay_events_total", "published"], found["custody_relay_events_total", "dead"]) == (2, 1)
    assert found["custody_relay_publish_seconds_count",] == 3
    assert (found["custody_relay_in_flight",], found["custody_relay_overdue_seconds",]) == (0, 0)
    assert found["custody_relay_last_claim_timestamp_seconds",] > 1.7e9


def test_the_command_of_a_relay_answers(start, c: Custody) -> None:  # noqa: F811
    process = start("relay", "run", "--publisher", "mine=stdout", "--metrics-port", "0", "--health-port", "0")
    (address,) = listening(process)
    assert get(f"{address}/healthz")[0] == get(f"{address}/readyz")[0] == 200
    assert "custody_relay_events_total" in get(f"{address}/metrics")[1]
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 0


def test_a_port_that_is_taken_is_refused(quick: Run, tmp_path: Path, orders: Custody) -> None:  # noqa: F811
    (tmp_path / "handlers.py").write_text(HANDLERS)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        refused = quick(
            "work", "handlers:handle", "-t", "orders", "-g", "stock", "--health-port", port, "--json", code=1
        ).error
    assert refused["code"] == "invalid_argument"
    assert f"port {port} of 127.0.0.1 cannot be used" in refused["message"]
    with pytest.raises(InvalidArgument), answering("no.such.host.invalid", 0, {}):
        pass


def test_without_the_package_the_extra_is_named(tmp_path: Path, database_url: str, orders: Custody) -> None:
    (tmp_path / "handlers.py").write_text(HANDLERS)
    (tmp_path / "run.py").write_text(
        "import sys\n"
        "sys.modules['prometheus_client'] = None\n"
        "from custody.cli import run\n"
        "sys.exit(run(sys.argv[1:]))\n"
    )
    arguments = ["work", "handlers:handle", "-t", "orders", "-g", "stock", "--metrics-port", "0", "--json"]
    done = subprocess.run(
        [sys.executable, "run.py", *arguments, "--database", database_url],
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    error = json.loads(done.stderr.splitlines()[-1])["error"]
    assert (error["code"], error["remedy"]) == ("extra_missing", "Install it: pip install 'custody[http]'")


def test_more_clients_than_there_is_room_for_do_no_harm() -> None:
    with ExitStack() as stack:
        port = stack.enter_context(answering("127.0.0.1", 0, {"/": lambda: (b"ok", "text/plain")}))
        idle = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(AT_ONCE)]
        answer = attempt(f"http://127.0.0.1:{port}/")
        wait_for(lambda: attempt(f"http://127.0.0.1:{port}/") is None, "the next one is turned away")
        for one in idle:
            one.close()
        wait_for(lambda: attempt(f"http://127.0.0.1:{port}/") == (200, "ok"), "there is room again")
        assert answer in (None, (200, "ok"))


def attempt(url: str) -> tuple[int, str] | None:
    try:
        return get(url)
    except OSError:
        return None
