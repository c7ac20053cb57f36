"""`custody capture`: what it writes is run by pytest, as a user runs it."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import Run
from tests.http.conftest import served

import custody
from custody.model.outcomes import outcome_of
from custody.testing.handling import Handling

pytestmark = pytest.mark.req("X12")

HANDLERS = """
import asyncio
import hashlib
from dataclasses import dataclass

import custody
import msgspec

seen = []


def broken(message):
    seen.append(message.payload)
    return message.payload["n"] + 1


def mended(message):
    seen.append(message.payload)


def digest(message):
    "Its error says exactly what it was given."
    given = message.payload if isinstance(message.payload, bytes) else msgspec.json.encode(message.payload)
    hashed = hashlib.sha256(given).hexdigest()
    what = [type(message.payload).__name__, hashed, message.key, sorted(message.headers.items())]
    raise ValueError(f'\\"\\"\\" {what!r} \\'\\'\\' \\n# \\x00 {{}}')


@dataclass
class Order:
    n: int


@custody.handler(payload=Order)
async def typed(message):
    await asyncio.sleep(0)
    assert message.payload.n < 5, "too many"


class Shop:
    @staticmethod
    def needs_the_first(message):
        "The failure depends on what came before it in its key."
        seen.append(message.payload)
        if seen.count("add") > 1:
            raise RuntimeError("added twice")
"""
HOSTILE = {
    "quotes": "'''\"\"\"\\'\\\" {x} {{y}} %s \\N{DASH} \\",
    "control": "\x00\x1b[2J\r\n\u2028\ud7ff\u202e",
    "nested": {"a": [1, 2.5, None, True, {"b": "\N{SNOWMAN}"}]},
}


def deep(levels: int) -> Any:
    value: Any = "x"
    for _ in range(levels):
        value = [value]
    return value


@pytest.fixture
def handlers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """The functions of a module of the user."""
    (tmp_path / "incident_handlers.py").write_text(HANDLERS, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("incident_handlers")
    yield lambda name: getattr(module, name)
    del sys.modules["incident_handlers"]


@pytest.fixture
def orders(c: custody.Custody) -> custody.Custody:
    c.create_topic("orders", partitions=2)
    c.create_group("orders", "stock", custody.Policy(ordering="key", max_attempts=2, backoff=custody.Constant("5s")))
    return c


def work(c: custody.Custody, clock: Any, handler: Any, *, group: str = "stock") -> None:
    """As a worker does, one message at a time, with the clock of the test."""
    with Handling(handler) as call:
        while True:
            lease = c.claim("orders", group)
            for message in lease:
                c.settle(lease.lease_id, {message.offset: outcome_of(call(message))})
            if not lease:
                due = c.next_due("orders", group)
                if due is None:
                    return
                clock.move(due + 0.001)


def place(receipt: Any) -> str:
    return f"{receipt.topic}/{receipt.partition}/{receipt.offset}"


def pytest_of(directory: Path, server_url: str, *, code: int) -> dict[str, str]:
    """The outcome of each file, by its name."""
    plugins = ("cacheprovider", "asyncio", "hypothesispytest", "schemathesis", "xdist")  # of this environment
    without = [part for name in plugins for part in ("-p", f"no:{name}")]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rA", "-W", "error", "--tb=short", *without, "."],
        cwd=directory,
        env={**os.environ, "CUSTODY_TEST_DATABASE": server_url},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == code, run.stdout + run.stderr
    found = {}
    for outcome, file in re.findall(r"^(PASSED|FAILED|ERROR) test_(\w+)\.py::", run.stdout, re.MULTILINE):
        found[file] = outcome
    found["output"] = run.stdout
    return found


def test_what_is_captured_happens_again_until_the_handler_is_mended(
    orders: custody.Custody, clock: Any, handlers: Callable[[str], Any], quick: Run, tmp_path: Path, server_url: str
) -> None:
    """One run of pytest over all files, which costs as much as one of them."""

    def capture(name: str, where: str, *options: str) -> None:
        quick("capture", where, "--output", f"test_{name}.py", *options)

    for n in range(3):
        orders.publish("orders", {"n": n}, key="k")
    poison = orders.publish("orders", {"m": 1}, key="k", headers={"x-from": "shop"})
    work(orders, clock, handlers("broken"))
    capture("broken", place(poison), "--handler", "incident_handlers:broken")
    capture("recorded", place(poison), "--handler", "incident_handlers:broken", "--expect", "recorded")
    capture("mended", place(poison), "--handler", "incident_handlers:mended")
    capture("mended_recorded", place(poison), "--handler", "incident_handlers:mended", "--expect", "recorded")
    capture("nameless", place(poison))
    capture("redacted", place(poison), "--handler", "incident_handlers:mended", "--redact", "n", "--redact-key",
            "--redact-header", "x-from")  # fmt: skip
    typed = orders.publish("orders", {"n": 7})
    work(orders, clock, handlers("typed"))
    capture("typed", place(typed), "--handler", "incident_handlers:typed", "--expect", "recorded")
    unfit = orders.publish("orders", {"n": "seven"})
    work(orders, clock, handlers("typed"))
    capture("unfit", place(unfit), "--handler", "incident_handlers:typed", "--expect", "recorded")
    for payload in ("add", "add"):
        last = orders.publish("orders", payload, key="twice")
    work(orders, clock, handlers("Shop").needs_the_first)
    capture("before", place(last), "--handler", "incident_handlers:Shop.needs_the_first", "--expect", "recorded")
    killed = orders.publish("orders", {"n": 1})
    orders.claim("orders", "stock")  # and its worker dies
    clock.move(60)
    work(orders, clock, handlers("mended"))
    capture("killed", place(killed), "--handler", "incident_handlers:mended", "--expect", "recorded")

    found = pytest_of(tmp_path, server_url, code=1)
    output = found.pop("output")
    assert found == {
        "broken": "FAILED",
        "recorded": "PASSED",
        "mended": "PASSED",
        "mended_recorded": "FAILED",
        "nameless": "ERROR",
        "redacted": "PASSED",
        "typed": "PASSED",
        "unfit": "PASSED",
        "before": "PASSED",
        "killed": "PASSED",
    }
    assert "attempt 2: dead, KeyError: 'n' (as recorded)" in output
    assert "attempt 1: ack (recorded: nack, KeyError: 'n')" in output
    assert "name the handler: return it from this fixture, or capture with --handler" in output
    source = (tmp_path / "test_broken.py").read_text()
    assert source.count("Outgoing(") == 4, "what came before it in its key"
    assert "incident_handlers.py" in source, "the end of the traceback"
    assert "'shop'" not in (tmp_path / "test_redacted.py").read_text()


def test_every_payload_comes_back_exactly(
    orders: custody.Custody, clock: Any, handlers: Callable[[str], Any], quick: Run, tmp_path: Path, server_url: str
) -> None:
    payloads = [
        [HOSTILE, "", [], {}, 1.0, True, 2**60],
        HOSTILE["quotes"] + HOSTILE["control"],
        None,
        b"\x00\xff'\"\\",
        deep(150),
        deep(400),
        "é" * 500_000,
        os.urandom(1_000_000),
    ]
    key = "'''\"\"\"\\ \n#\N{SNOWMAN}"
    receipts = [orders.publish("orders", one, key=key, headers={"a'\"\n": HOSTILE["quotes"]}) for one in payloads]
    work(orders, clock, handlers("digest"))
    for number, receipt in enumerate(receipts):
        quick("capture", place(receipt), "--output", f"test_payload_{number}.py", "--before", "0",
              "--handler", "incident_handlers:digest", "--expect", "recorded")  # fmt: skip
    found = pytest_of(tmp_path, server_url, code=0)
    found.pop("output")
    assert found == {f"payload_{number}": "PASSED" for number in range(len(payloads))}


def test_it_is_written_to_stdout_or_to_a_new_file(
    orders: custody.Custody, handlers: Callable[[str], Any], quick: Run, tmp_path: Path
) -> None:
    receipt = orders.publish("orders", "x", key="k")
    orders.claim("orders", "stock").nack(error="no", requeue=False)
    source = quick("capture", place(receipt)).out
    compile(source, "test_x.py", "exec")
    file = tmp_path / "test_x.py"
    said = quick("capture", place(receipt), "--output", "test_x.py").out
    assert said == "test_x.py: 1 attempt, 0 earlier messages of its key\n"
    file.write_text("mine")
    refused = quick("capture", place(receipt), "--output", "test_x.py", code=2)
    assert "test_x.py exists" in refused.err
    assert file.read_text() == "mine"
    quick("capture", place(receipt), "--output", "test_x.py", "--force")
    assert file.read_text() == source
    document = json.loads(quick("capture", place(receipt), "--json").out)
    assert (document["source"], document["attempts"], document["before"]) == (source, 1, 0)


def test_what_came_before_is_bounded_and_found_behind_others(
    orders: custody.Custody, quick: Run, handlers: Callable[[str], Any]
) -> None:
    partition = orders.publish("orders", "first", key="k").partition
    orders.publish_many("orders", [custody.Outgoing(n, partition=partition) for n in range(1_200)])
    for n in range(5):
        last = orders.publish("orders", f"later {n}", key="k")
    lease = orders.claim("orders", "stock", max_messages=2_000, partition=partition)
    lease.ack(*lease.messages[:-1])
    lease.nack(error="no", requeue=False)
    assert json.loads(quick("capture", place(last), "--json").out)["before"] == 5
    two = quick("capture", place(last), "--before", "2").out
    assert [text in two for text in ("later 1", "later 2", "later 3", "later 4")] == [False, True, True, True]


def test_redaction(orders: custody.Custody, quick: Run) -> None:
    customer = {"email": "ada@example.org", "age": 36, "tags": ["vip"], "note": None}
    receipt = orders.publish(
        "orders", {"customer": customer, "items": [{"sku": "SKU-77"}, {"sku": "SKU-78"}]}, key="ada@example.org"
    )
    orders.claim("orders", "stock").nack(error="ValueError: no mail to ada@example.org about SKU-78", requeue=False)
    fields = [part for path in ("customer.email", "customer.age", "customer.tags", "customer.note", "items.sku")
              for part in ("--redact", path)]  # fmt: skip
    source = quick("capture", place(receipt), *fields, "--redact-key").out
    for secret in ("ada@", "36", "vip", "SKU-77", "SKU-78"):
        assert secret not in source
    assert "no mail to redacted about redacted" in source
    assert "'age': 0, 'tags': [], 'note': None" in source
    wrong = quick("capture", place(receipt), "--redact", "customer.emial", code=1)
    assert "no message has 'customer.emial'" in wrong.err
    assert "Did you mean 'customer.email'?" in wrong.err
    text = orders.publish("orders", "plain text")
    orders.claim("orders", "stock").ack()
    assert "is text: it has no fields" in quick("capture", place(text), "--redact", "a", code=1).err


def test_what_cannot_be_captured_is_refused(
    orders: custody.Custody, db: Any, clock: Any, quick: Run, tmp_path: Path
) -> None:
    def refused(*arguments: str, code: int = 1) -> str:
        said = quick("capture", *arguments, "--output", "test_x.py", code=code).err
        assert not (tmp_path / "test_x.py").exists()
        return said

    receipt = orders.publish("orders", 1, key="k")
    where = place(receipt)
    assert "is not TOPIC/PARTITION/OFFSET" in refused("orders/0", code=2)
    assert "there is no topic" in refused("missing/0/0")
    assert "the journal has no attempt of" in refused(where)
    assert "has no group 'missing'" in refused(where, "--group", "missing")
    assert "has no offset 99" in refused(f"orders/{receipt.partition}/99", "--group", "stock")
    orders.create_group("orders", "mail")
    for group in ("stock", "mail"):
        orders.claim("orders", group).ack()
    assert "several groups have had" in refused(where)
    assert "--group" in refused(where)
    assert "is not MODULE:NAME" in refused(where, "--group", "mail", "--handler", "os;x:y")
    orders.create_group("orders", "bare", bare=True)
    assert "is bare" in refused(where, "--group", "bare")


def test_after_retention_a_dead_letter_is_still_there_and_others_are_refused(
    orders: custody.Custody, db: Any, quick: Run
) -> None:
    dead = orders.publish("orders", {"n": 1}, partition=0)
    done = orders.publish("orders", {"n": 2}, partition=0)
    lease = orders.claim("orders", "stock", max_messages=2)
    lease.nack(lease.messages[0], error="no", requeue=False)
    lease.ack()
    db.execute("SELECT custody.seal_segment('orders')")
    db.execute("SELECT custody.drop_segments('orders')")
    assert "'n': 1" in quick("capture", place(dead)).out
    refused = quick("capture", place(done), code=1).err
    assert "is gone" in refused
    assert "Retention has dropped it" in refused


def test_over_http(orders: custody.Custody, quick: Run) -> None:
    orders.publish("orders", b"\x00\xff", key="k")
    receipt = orders.publish("orders", {"n": 1}, key="k")
    lease = orders.claim("orders", "stock", max_messages=2)
    lease.ack(lease.messages[0])
    lease.nack(error="no", requeue=False)
    with served(orders) as server:
        over_http = quick("capture", place(receipt), "--database", server.url).out
    assert over_http == quick("capture", place(receipt)).out
    assert r"b'\x00\xff'" in over_http
