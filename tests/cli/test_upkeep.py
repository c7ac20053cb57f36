"""custody topics retain, grow, describe; custody maintain; custody journal."""

from __future__ import annotations

import json

import pytest
from tests.cli.conftest import Run
from tests.waiting import wait_for

from custody import Custody, Policy, Retention


def spoil(live: Custody) -> None:
    """A topic with a sealed segment that group stock holds, and a dead letter."""
    live.create_topic("orders", partitions=2, retention=Retention(size="1B", segment_size="1B"))
    live.create_group("orders", "stock")
    live.publish("orders", 1, partition=1)
    live.maintain()
    live.publish("orders", 2, partition=0)


@pytest.mark.req("V13")
def test_a_retention_is_set_shown_and_taken_away(quick: Run, live: Custody, explained) -> None:
    options = ["--retention-time", "7d", "--retention-size", "10GB", "--segment-time", "6h", "--segment-size", "1GB"]
    made = quick("topics", "create", "orders", *options, "--json").document
    explained(made)
    assert made["retention"] == {
        "time": 7 * 86400.0,
        "size": 10 * 2**30,
        "segment_time": 6 * 3600.0,
        "segment_size": 2**30,
        "drop_unresolved": False,
    }
    assert "retention          7 d and at most 10 GB" in quick("topics", "describe", "orders").out
    said = quick("topics", "retain", "orders", "--retention-size", "512MB", "--drop-unresolved").out
    assert said == "topic orders: at most 512 MB, unresolved messages too\n"
    assert quick("topics", "retain", "orders", "--everything").out == "topic orders: everything is kept\n"
    assert live.topic("orders").retention is None


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--everything", "--retention-time", "1d"],
        ["--segment-time", "1d"],
        ["--drop-unresolved"],
        ["--retention-size", "much"],
        ["--retention-time", "soon"],
    ],
)
def test_a_retention_that_says_nothing_is_a_usage_error(quick: Run, live: Custody, options: list[str]) -> None:
    live.create_topic("orders")
    assert quick("topics", "retain", "orders", *options, "--json", code=2).error["code"] == "usage"
    assert live.topic("orders").retention is None


@pytest.mark.req("V13")
def test_describe_shows_segments_and_what_holds_one(quick: Run, live: Custody, explained) -> None:
    spoil(live)
    document = quick("topics", "describe", "orders", "--json").document
    explained(document)
    first, second = document["segments"]
    assert (first["messages"], first["held_group"], first["held_partition"], first["held_offset"]) == (1, "stock", 1, 0)
    assert first["sealed_at"] is not None
    assert (second["sealed_at"], second["messages"], second["held_group"]) == (None, 1, None)
    assert first["bytes"] > 0
    assert document["kept_dead_letters"] == {"events": 0, "bytes": 0}
    shown = quick("topics", "describe", "orders").out
    assert f"segment {first['segment']} is held by group stock: partition 1, offset 0 is not resolved" in shown


@pytest.mark.req("V7", "V13")
def test_maintain_says_what_it_did_and_what_it_could_not(quick: Run, live: Custody, explained) -> None:
    assert quick("maintain").out == "There is nothing to do.\n"
    spoil(live)
    held = quick("maintain", "--topic", "orders", "--json").document
    explained(held)
    assert [(one["did"], one["held_group"]) for one in held] == [("sealed", None), ("held", "stock")]
    assert "is held by group stock: partition 1, offset 0 is not resolved" in quick("maintain").out
    lease = live.claim("orders", "stock", partition=1)
    lease.nack(requeue=False)
    live.claim("orders", "stock").ack()
    said = quick("maintain").out.splitlines()
    assert said[0].endswith("1 message), 1 dead letter copied")
    assert [line.split()[3] for line in said] == ["dropped", "dropped"]
    assert "kept dead letters  1" in quick("topics", "describe", "orders").out
    assert quick("maintain", "--topic", "nowhere", "--json", code=1).error["code"] == "topic_not_found"


@pytest.mark.req("V13")
def test_maintain_goes_on_until_it_is_told_to_stop(start, live: Custody) -> None:
    process = start("maintain", "--every", "100ms", "--json")
    spoil(live)
    lines: list[str] = []
    wait_for(lambda: lines.append(process.stdout.readline()) or "held" in lines[-1], "it has not maintained the topic")
    assert json.loads(lines[-1])[-1]["held_group"] == "stock"
    process.terminate()
    process.wait(10)


@pytest.mark.req("V13")
def test_the_journal_is_shown_and_its_retention_set(quick: Run, live: Custody, explained) -> None:
    assert quick("journal").out.startswith("kept           everything is kept\n")
    found = quick("journal", "--keep-time", "30d", "--keep-size", "5GB", "--json").document
    explained(found)
    assert (found["keep_time"], found["keep_size"], found["dropped_until"]) == (30 * 86400.0, 5 * 2**30, None)
    assert [part["part"] for part in found["parts"]] == [0]
    assert "kept           30 d and at most 5 GB" in quick("journal").out
    assert quick("journal", "--keep-all", "--json").document["keep_time"] is None
    assert quick("journal", "--keep-all", "--keep-time", "1d", "--json", code=2).error["code"] == "usage"


@pytest.mark.req("V13")
def test_a_topic_grows_or_says_why_not(quick: Run, live: Custody) -> None:
    live.create_topic("orders")
    assert quick("topics", "grow", "orders", "4").out == "topic orders has 4 partitions\n"
    assert quick("topics", "grow", "orders", "5", "--json").document["partitions"] == 5
    live.create_group("orders", "stock", Policy(ordering="key"))
    live.publish("orders", 1, key="a")
    refused = quick("topics", "grow", "orders", "8", "--json", code=1).error
    assert refused["code"] == "conflict"
    assert "group 'stock'" in refused["message"]
    assert quick("topics", "grow", "orders", "2", "--json", code=1).error["code"] == "conflict"
