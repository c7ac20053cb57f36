"""custody work: a handler of one's own, stopped by a signal without losing anything."""

from __future__ import annotations

import json
import signal
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from tests.cli.conftest import Run
from tests.waiting import wait_for

import custody
from custody import Constant, Custody, Outgoing, Policy
from custody.cli.app_file import target
from custody.model.outcomes import Counts

HANDLERS = """
import time
import custody

def handle(message):
    if message.payload == "poison":
        raise custody.Dead("poison")

def slow(message):
    time.sleep(0.05)

async def asynchronous(message):
    if message.attempt == 1:
        raise ValueError("not at first")

class Stock:
    @staticmethod
    def apply(message):
        pass

number = 1
"""


APP = """
from dataclasses import dataclass
import custody

app = custody.App()

@dataclass
class Order:
    n: int

@app.on("orders", group="stock", payload=Order)
def stock(message):
    message.as_(Order).n

@app.on("mails", group="sender", concurrency=2)
async def send(message):
    pass

@app.every("1s")
def refresh():
    print("tick", flush=True)
"""


@pytest.fixture(autouse=True)
def _orders(live: Custody, tmp_path: Path) -> None:
    (tmp_path / "handlers.py").write_text(HANDLERS)
    (tmp_path / "shops.py").write_text("import custody\nfirst, second = custody.App(), custody.App()\n")
    (tmp_path / "shop.py").write_text(APP)
    live.create_topic("orders", partitions=2)
    live.create_group("orders", "stock", Policy(max_attempts=3, backoff=Constant("0s")))


def test_it_works_until_sigterm_and_says_what_it_did(start, live: Custody, explained) -> None:
    live.publish_many("orders", [Outgoing("poison" if n == 7 else n) for n in range(200)])
    process = start("work", "handlers:handle", "--topic", "orders", "--group", "stock", "--json", "--name", "me")
    wait_for(lambda: live.stats("orders", "stock").depth == 0, "everything to be handled")
    live.publish("orders", "later", key="a")
    wait_for(lambda: live.stats("orders", "stock").depth == 0, "the late one to be handled")
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 0, err
    document = json.loads(out)
    explained(document)
    assert document["summary"] == asdict(Counts(done=200, dead=1))
    assert [letter.last_error for letter in live.dead("orders", "stock")] == ["poison"]


@pytest.mark.req("V5")
def test_ctrl_c_finishes_what_has_begun_and_gives_back_the_rest(start, live: Custody) -> None:
    live.publish_many("orders", list(range(500)))
    process = start("work", "handlers:slow", "-t", "orders", "-g", "stock", "--concurrency", "4")
    wait_for(lambda: live.stats("orders", "stock").depth < 500, "the first to be done")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 0, err
    assert "working on orders/stock" in err
    done = int(out.removeprefix("stopped: ").split(" done")[0].replace(",", ""))
    stats = live.stats("orders", "stock")
    assert (stats.in_flight, stats.depth, stats.dead) == (0, 500 - done, 0)


@pytest.mark.req("V12")
def test_a_coroutine_is_a_handler_too(start, live: Custody) -> None:
    live.publish_many("orders", list(range(5)))
    process = start("work", "handlers:asynchronous", "-t", "orders", "-g", "stock", "--json")
    wait_for(lambda: live.stats("orders", "stock").depth == 0, "the second attempts")
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=30)
    assert (json.loads(out)["summary"]["done"], json.loads(out)["summary"]["failed"]) == (5, 5)


@pytest.mark.parametrize(
    ("handler", "complaint"),
    [
        ("handlers", "handlers has no app"),
        ("handlers:", "is not FILE, MODULE or MODULE:NAME"),
        ("nothing.py", "there is no file nothing.py"),
        ("shops.py", "has several apps"),
        ("shops.py:first", "is an app: its code says what --topic and --group would"),
        ("handlers:handel", "has no 'handel'"),
        ("handlers:number", "is a int, and neither an app nor a function"),
        ("nowhere:handle", "there is no module 'nowhere'"),
    ],
)
def test_a_handler_that_is_not_there(quick: Run, handler: str, complaint: str) -> None:
    assert complaint in quick("work", handler, "-t", "orders", "-g", "stock", code=2).err


@pytest.mark.parametrize(
    ("file", "given", "said", "remedy"),
    [
        ("import nothing_of_that_name\n", "broken:handle", "line 1: ModuleNotFoundError: No module named", "TRACEBACK"),
        ("import os\n\nkey = os.environ['NO_KEY']\n", "broken.py", "line 3: KeyError: 'NO_KEY'", "TRACEBACK"),
        ("import custody\napp = custody.App(\n", "broken.py", "line 2: SyntaxError: '(' was never closed", "TRACEBACK"),
        ("import sys\nsys.exit(3)\n", "broken", "line 2: SystemExit: 3", "TRACEBACK"),
        ("import custody\ncustody.Policy(max_attempts=0)\n", "broken.py", "line 2: InvalidPolicy: max_attempts", ""),
    ],
)
def test_a_file_that_cannot_be_imported_is_named_with_its_line(
    quick: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, given: str, said: str, remedy: str
) -> None:
    (tmp_path / "broken.py").write_text(file)
    monkeypatch.delitem(sys.modules, "broken", raising=False)
    failed = quick("work", given, *(["-t", "orders", "-g", "stock"] if ":" in given else []), code=1)
    assert f"error: broken.py, {said}" in failed.err
    assert remedy in failed.err
    sys.modules.pop("broken", None)


def test_a_group_that_is_not_there(quick: Run) -> None:
    assert quick("work", "handlers:Stock.apply", "-t", "orders", "-g", "x", "--json", code=1).error["code"] == (
        "group_not_found"
    )


@pytest.mark.req("X12")
def test_an_app_runs_all_its_handlers_and_schedules(start, live: Custody, explained) -> None:
    live.publish_many("orders", [{"n": 1}, {"n": "x"}])
    process = start("work", "shop.py", "--json")
    assert process.stdout is not None
    assert process.stdout.readline() == "tick\n"
    wait_for(lambda: live.stats("orders", "stock").depth == 0, "the orders are handled")
    assert live.schedule("refresh").app == "shop"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 0, err
    document = json.loads(out.splitlines()[-1])
    explained(document)
    assert document["app"] == "shop"
    by_name = {f"{one['topic']}/{one['group']}": one["summary"] for one in document["handlers"]}
    assert [*by_name] == ["orders/stock", "mails/sender", "schedules/refresh"]
    assert (by_name["orders/stock"]["done"], by_name["orders/stock"]["dead"]) == (1, 1)
    assert "created topic mails" in err


@pytest.mark.parametrize("place", ["shop.py", "shop.py:app", "shop", "shop:app"])
def test_an_app_is_found_by_its_file_or_module(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "shop", raising=False)
    found = target(place)
    assert isinstance(found, custody.App)
    assert (found.name, [*found.schedules]) == ("shop", ["refresh"])
    monkeypatch.delitem(sys.modules, "shop")


def test_an_app_and_a_function_want_different_options(quick: Run) -> None:
    assert "give the --topic and the --group" in quick("work", "handlers:handle", code=2).err
    assert "--only is for apps" in quick("work", "handlers:handle", "-t", "a", "-g", "b", "--only", "c", code=2).err
    assert "no handler 'mail'" in quick("work", "shop.py", "--only", "mail", code=1).err


def test_failures_are_logged_with_their_traceback(start, live: Custody) -> None:
    live.publish_many("orders", [Outgoing(n) for n in range(20)])
    process = start(
        "work", "handlers:asynchronous", "--topic", "orders", "--group", "stock", "--json", "--log-format", "json"
    )
    wait_for(lambda: live.stats("orders", "stock").depth == 0, "everything to be handled")
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 0, err
    (line,) = [json.loads(line) for line in err.splitlines()]
    assert (line["level"], line["logger"]) == ("warning", "custody.worker.failure_log")
    assert line["traceback"].endswith("ValueError: not at first")
    assert "handlers.py" in line["traceback"]
