"""custody publish: arguments, files, pipes, and a stop that says how far it came."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest
from tests.cli.conftest import Run
from tests.waiting import wait_for

from custody import Custody, Message
from custody.cli.intake import Reading
from custody.errors import InvalidPayload


@pytest.fixture(autouse=True)
def _topic(live: Custody) -> None:
    live.create_topic("orders", partitions=2)


def everything(live: Custody, topic: str = "orders") -> list[Message]:
    found = []
    for partition in range(live.topic(topic).partitions):
        offset = 0
        while some := live.read(topic, partition, offset=offset, max_messages=10_000):
            found += some
            offset = some[-1].offset + 1
    return found


def test_payloads_as_arguments(quick: Run, live: Custody, explained) -> None:
    split = ("publish", "orders", '{"n": 1}', "--key", "a", "-H", "source=shell", "-H", "x=a=b", "--partition", "1")
    assert "the key 'a' belongs to partition 0, and the message names partition 1" in quick(*split, code=1).err
    one = quick(*split, "--allow-split")
    assert one.out == "published 1 message to orders/1/0\n"
    (message,) = everything(live)
    assert (message.payload, message.key, message.headers) == ({"n": 1}, "a", {"source": "shell", "x": "a=b"})

    document = quick("publish", "orders", "2", "null", "--partition", "0", "--json").document
    explained(document)
    assert document == {
        "topic": "orders",
        "published": 2,
        "delayed": [],
        "interrupted": False,
        "partitions": [{"partition": 0, "published": 2, "first_offset": 0, "last_offset": 1}],
    }
    quick("publish", "orders", "not json", "--text", "--partition", "0", "-q")
    quick("publish", "orders", "raw", "--bytes", "--partition", "0")
    assert [message.payload for message in live.read("orders", 0)] == [2, None, "not json", b"raw"]


def test_lines_of_stdin_in_batches(cli: Run, live: Custody) -> None:
    lines = "".join(json.dumps({"n": n, "sku": f"SKU-{n % 7}"}) + "\n" for n in range(2500))
    said = cli("publish", "orders", "--key-field", "sku", stdin=lines + "\n")
    assert said.out == "published 2,500 messages to orders\n"
    assert said.err == ""
    messages = everything(live)
    assert sorted(message.payload["n"] for message in messages) == list(range(2500))
    assert all(message.key == message.payload["sku"] for message in messages)


def test_a_file_of_envelopes(quick: Run, live: Custody, tmp_path: Path) -> None:
    envelopes = [
        {"payload": {"n": 1}, "key": "a", "headers": {"h": "1"}, "partition": 1, "allow_split": True},
        {"payload_base64": "AAE=", "partition": 1},
    ]
    (tmp_path / "messages.ndjson").write_text("\n".join(map(json.dumps, envelopes)))
    quick("publish", "orders", "--envelope", "--file", "messages.ndjson", "--key", "default", "-H", "all=yes")
    first, second = live.read("orders", 1)
    assert (first.payload, first.key, first.headers) == ({"n": 1}, "a", {"h": "1", "all": "yes"})
    assert (second.payload, second.key) == (b"\x00\x01", "default")
    assert "does not exist" in quick("publish", "orders", "--file", "missing", code=2).err


def test_a_bad_line_says_which_and_what_went_before(quick: Run, live: Custody) -> None:
    lines = "1\n" * 1500 + "{oops\n"
    failed = quick("publish", "orders", stdin=lines, code=1)
    assert "1,000 messages had been published before this:" in failed.err
    assert "error: line 1501 is not JSON" in failed.err
    assert len(everything(live)) == 1000
    assert quick("publish", "nowhere", "--json", stdin="1\n", code=1).error["code"] == "topic_not_found"
    assert "cannot be combined" in quick("publish", "orders", "--text", "--bytes", "x", code=2).err


@pytest.mark.parametrize(
    ("reading", "line", "complaint"),
    [
        (Reading(form="json", key_field="sku"), b'{"sk": 1}', "Did you mean 'sk'?"),
        (Reading(form="json", key_field="sku"), b"1", "needs JSON objects"),
        (Reading(form="envelope"), b'{"payload": 1, "kye": "a"}', "Did you mean 'key'?"),
        (Reading(form="envelope"), b'{"key": "a"}', "is not an object with either payload"),
        (Reading(form="envelope"), b'{"payload_base64": "?"}', "is not base64"),
        (Reading(form="envelope"), b'{"payload": 1, "partition": "0"}', "is not a whole number"),
        (Reading(form="envelope"), b'{"payload": 1, "headers": 1}', "are not an object"),
        (Reading(form="text"), b"\xff", "--bytes"),
        (Reading(form="json"), b"\xff", "is not JSON"),
    ],
)
def test_what_is_no_message(reading: Reading, line: bytes, complaint: str) -> None:
    with pytest.raises(InvalidPayload) as refused:
        reading.message(line, "line 1")
    assert complaint in str(refused.value)


def test_a_slow_pipe_is_published_as_it_comes(start, live: Custody) -> None:
    process = start("publish", "orders")
    process.stdin.write("1\n2\n")
    process.stdin.flush()
    wait_for(lambda: len(everything(live)) == 2, "two messages of an open pipe")
    out, err = process.communicate("3\n", timeout=30)
    assert (process.returncode, out, err) == (0, "published 3 messages to orders\n", "")
    assert len(everything(live)) == 3


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_publish_says_how_many_there_are(start, live: Custody, number: int) -> None:
    process = start("publish", "orders", "--json")
    process.stdin.write("1\n" * 3000)
    process.stdin.flush()
    wait_for(lambda: len(everything(live)) > 0, "a first batch")
    process.send_signal(number)
    time_limit = time.monotonic() + 30
    out, err = process.communicate(timeout=time_limit - time.monotonic())
    assert process.returncode == 130, err
    assert err == "interrupted\n"
    document = json.loads(out)
    assert document["interrupted"]
    assert document["published"] == len(everything(live))
