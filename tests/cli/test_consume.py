"""custody consume: what is printed is done, and nothing else."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import COMMAND, Run
from tests.waiting import wait_for

from custody import Custody, Outgoing, Policy
from custody.cli import consume


@pytest.fixture(autouse=True)
def _topic(live: Custody) -> None:
    live.create_topic("orders")
    live.create_group("orders", "stock", Policy(ordering="key"))


def test_it_prints_and_acknowledges(quick: Run, live: Custody, explained) -> None:
    live.publish("orders", {"n": 0}, key="a", headers={"h": "1"})
    live.publish_many("orders", [b"\x00", "te\x1bxt", Outgoing(3)])
    first = quick("consume", "orders", "stock", "--max", "1")
    assert first.out == '0/0  key=a  h=1  {"n":0}\n'
    assert first.err == "1 message consumed\n"
    rest = quick("consume", "orders", "stock", "--json")
    assert rest.err == ""
    for document in rest.documents:
        explained(document)
    assert [d.get("payload", d.get("payload_base64")) for d in rest.documents] == ["AA==", "te\x1bxt", 3]
    assert set(rest.documents[-1]) == {
        *("topic", "partition", "offset", "key", "payload", "headers", "attempt", "published_at", "priority"),
        "topic_uid",
    }
    assert live.stats("orders", "stock").depth == 0
    nothing = quick("consume", "orders", "stock", "-q")
    assert (nothing.out, nothing.err) == ("", "")


def test_escape_sequences_do_not_reach_the_terminal(quick: Run, live: Custody) -> None:
    live.publish("orders", "a\x1b[2Jb\nc", key="k\x07")
    assert quick("consume", "orders", "stock").out == "0/0  key=k\\x07  a\\x1b[2Jb\\nc\n"


def test_only_looking_leaves_everything_as_it_was(quick: Run, live: Custody) -> None:
    live.publish_many("orders", list(range(250)))
    looked = quick("consume", "orders", "stock", "--no-ack", "--json")
    assert [document["payload"] for document in looked.documents] == list(range(250))
    stats = live.stats("orders", "stock")
    assert (stats.depth, stats.in_flight) == (250, 0)
    assert live.claim("orders", "stock").messages[0].attempt == 1
    assert "cannot be combined" in quick("consume", "orders", "stock", "--no-ack", "--follow", code=2).err


@pytest.mark.req("X2")
def test_what_came_on_a_lease_that_may_be_over_is_given_back_unprinted(
    quick: Run, live: Custody, monkeypatch: pytest.MonkeyPatch
) -> None:
    live.publish_many("orders", list(range(3)))
    times = iter([0.0, 1000.0])  # before the claim and after it: this process was stopped meanwhile
    monkeypatch.setattr("custody.cli.consume.elapsed", lambda: next(times, 1000.0))
    answer = quick("consume", "orders", "stock", "--json")
    assert [(document["payload"], document["attempt"]) for document in answer.documents] == [(0, 1), (1, 1), (2, 1)]
    kinds = [entry.kind for entry in live.trace("orders", 0, 0)]
    assert kinds == ["claim", "release", "claim", "ack"]


def test_it_follows_until_it_is_interrupted(start, live: Custody) -> None:
    process = start("consume", "orders", "stock", "--follow", "--json")
    for n in range(3):
        live.publish("orders", n)
        assert json.loads(process.stdout.readline())["payload"] == n
    wait_for(lambda: live.stats("orders", "stock").depth == 0, "the last ack")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (130, "", "interrupted\n")


def test_a_reader_that_goes_away_loses_nothing(environment: dict[str, str], tmp_path: Path, live: Custody) -> None:
    live.publish_many("orders", ["x" * 1000] * 500)
    with subprocess.Popen(
        [*COMMAND, "consume", "orders", "stock"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        cwd=tmp_path,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        err = process.stderr.read()
        process.wait(timeout=30)
    assert b"Traceback" not in err
    stats = live.stats("orders", "stock")
    assert stats.in_flight == 0
    assert stats.depth >= 400  # a claim is 100, and a pipe holds no more than the first


@pytest.mark.req("V2")
def test_a_bare_group_is_read_and_committed(quick: Run, live: Custody) -> None:
    live.create_group("orders", "mirror", bare=True)
    live.publish_many("orders", list(range(150)))
    looked = quick("consume", "orders", "mirror", "--no-ack", "--max", "3", "--json")
    assert [document["payload"] for document in looked.documents] == [0, 1, 2]
    taken = quick("consume", "orders", "mirror", "--json")
    assert [document["payload"] for document in taken.documents] == list(range(150))
    assert quick("consume", "orders", "mirror").err == "0 messages consumed\n"


def test_a_pause_is_named(quick: Run, live: Custody) -> None:
    live.publish("orders", 1)
    live.pause("orders", "stock", reason="deploy")
    assert "stopped: paused" in quick("consume", "orders", "stock").err
    assert quick("consume", "orders", "nobody", "--json", code=1).error["code"] == "group_not_found"


@pytest.mark.req("X1")
def test_what_was_taken_away_while_it_was_printed_is_named_and_comes_again(
    quick: Run, live: Custody, monkeypatch: pytest.MonkeyPatch
) -> None:
    live.publish_many("orders", list(range(4)))
    printed, rewinds = consume._print, [2]

    def print_and_rewind(*arguments: Any) -> None:
        printed(*arguments)
        if rewinds:
            live.rewind("orders", "stock", to_offset=rewinds.pop())

    monkeypatch.setattr(consume, "_print", print_and_rewind)
    run = quick("consume", "orders", "stock", "--json")
    assert [document["payload"] for document in run.documents] == [0, 1, 2, 3, 2, 3]
    assert "does not hold offsets 2, 3" in run.err
    assert live.stats("orders", "stock").depth == 0
