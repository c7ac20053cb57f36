"""custody topics: list, create, describe, delete."""

from __future__ import annotations

import os
import pty
import subprocess
from pathlib import Path

import pytest
from tests.cli.conftest import COMMAND, Run

from custody import Custody


def test_a_topic_is_created_listed_and_described(quick: Run, live: Custody, explained) -> None:
    assert quick("topics", "list").out == "There are no topics.\n"
    said = quick("topics", "create", "orders", "--partitions", "2", "--max-depth", "10")
    assert said.out == "created topic orders with 2 partitions\n"
    assert (live.topic("orders").partitions, live.topic("orders").max_depth) == (2, 10)

    live.publish("orders", 1, partition=1)
    listed = quick("topics", "list")
    assert [line.split()[:4] for line in listed.out.splitlines()] == [
        ["topic", "partitions", "messages", "max"],
        ["orders", "2", "1", "10"],
    ]

    (document,) = quick("topics", "list", "--json").document
    explained(document)
    assert document == {
        "name": "orders",
        "partitions": 2,
        "max_depth": 10,
        "uid": str(live.topic("orders").uid),
        "created_at": live.topic("orders").created_at.isoformat(),
        "tails": [0, 1],
        "first_offsets": [0, 0],
        "retention": None,
        "message_count": 1,
        "priorities": False,
        "starvation_limit": None,
    }

    live.create_group("orders", "stock")
    described = quick("--json", "topics", "describe", "orders").document
    explained(described)
    assert described["topic"] == document
    assert [group["name"] for group in described["groups"]] == ["stock"]
    assert "groups             stock" in quick("topics", "describe", "orders").out


def test_a_topic_and_a_group_can_be_ensured_again_and_again(quick: Run, live: Custody) -> None:
    for _ in range(2):
        said = quick("topics", "create", "orders", "--partitions", "2", "--ensure")
        assert said.out == "there is topic orders with 2 partitions\n"
        said = quick("groups", "create", "orders", "stock", "--max-attempts", "5", "--bind", "orders.>", "--ensure")
        assert said.out == "there is group stock on topic orders\n"
    quick("topics", "create", "orders", "--ensure", "--retention-time", "7d")
    quick("groups", "create", "orders", "stock", "--ensure")
    assert (live.topic("orders").partitions, live.topic("orders").retention is not None) == (2, True)
    group = live.group("orders", "stock")
    assert (group.policy and group.policy.max_attempts, len(group.bindings)) == (5, 1)
    refused = quick("--json", "topics", "create", "orders", "--partitions", "1", "--ensure", code=1)
    assert refused.error["code"] == "settings_differ"


def test_a_topic_is_deleted_only_when_confirmed(quick: Run, live: Custody) -> None:
    live.create_topic("orders")
    live.publish("orders", 1)
    refused = quick("topics", "delete", "orders", code=2)
    assert "error: Delete topic orders with 1 message and 0 groups?" in refused.err
    assert "--yes" in refused.err
    assert quick("--json", "topics", "delete", "orders", code=2).error["code"] == "usage"
    assert [topic.name for topic in live.topics()] == ["orders"]

    assert quick("topics", "delete", "orders", "--yes", "--json").document == {"deleted": "orders", "messages": 1}
    assert live.topics() == []


@pytest.mark.parametrize(("answer", "code", "left"), [(b"n\n", 1, 1), (b"y\n", 0, 0)])
def test_on_a_terminal_it_asks(
    environment: dict[str, str], tmp_path: Path, live: Custody, answer: bytes, code: int, left: int
) -> None:
    live.create_topic("orders")
    ours, theirs = pty.openpty()
    os.write(ours, answer)
    done = subprocess.run(
        [*COMMAND, "topics", "delete", "orders"],
        stdin=theirs,
        capture_output=True,
        env=environment,
        cwd=tmp_path,
        timeout=60,
        check=False,
    )
    os.close(theirs)
    os.close(ours)
    assert done.returncode == code, done.stderr
    assert b"Delete topic orders with 0 messages and 0 groups? [y/N]" in done.stderr
    assert len(live.topics()) == left


def test_what_cannot_be_is_refused_in_words(quick: Run, live: Custody) -> None:
    live.create_topic("orders")
    exists = quick("topics", "create", "orders", code=1)
    assert exists.err == "error: topic 'orders' exists already\n  Use it, or choose another name.\n"
    unknown = quick("topics", "describe", "order", "--json", code=1).error
    assert unknown["code"] == "topic_not_found"
    assert unknown["remedy"]
    assert quick("topics", "create", "a b", code=1).err.startswith("error: 'a b' cannot be")
    assert "Invalid value for '--partitions'" in quick("topics", "create", "x", "--partitions", "0", code=2).err
    assert "Missing argument" in quick("topics", "create", code=2).err


@pytest.mark.req("G16")
def test_a_topic_with_priorities(quick: Run, live: Custody, explained) -> None:
    said = quick("topics", "create", "jobs", "--partitions", "2", "--priorities", "--starvation-limit", "30s")
    assert said.out == "created topic jobs with 2 partitions, 10 in the log: one for each priority\n"
    quick("publish", "jobs", "1", "2", "--priority", "high", "--key", "k")
    quick("publish", "jobs", '{"payload": 3, "priority": "low", "key": "k"}', "--envelope")
    live.create_group("jobs", "runners")
    described = quick("topics", "describe", "jobs").out
    assert "starvation limit 30 s" in described
    lanes = [line.split() for line in described.splitlines() if line.split()[1:2] in (["high"], ["low"])]
    assert sorted(int(line[-1]) for line in lanes) == [0, 0, 1, 2]
    stats = quick("stats", "jobs", "runners", "--json").document
    explained(stats)
    assert [one["priority"] for one in stats["partitions"]][:2] == ["critical", "high"]
    assert "background" in quick("stats", "jobs", "runners").out
    document = quick("topics", "list", "--json").document[0]
    explained(document)
    assert (document["priorities"], document["starvation_limit"]) == (True, 30.0)
    refused = quick("publish", "jobs", "1", "--partition", "0", "--priority", "low", code=1)
    assert "partition 0 is for critical messages" in refused.err


@pytest.mark.req("N10")
def test_a_group_with_fairness(quick: Run, live: Custody, explained) -> None:
    live.create_topic("orders")
    fair = ["--ordering", "key", "--fairness", "tenant", "--tenant-separator", "/"]
    made = quick("groups", "create", "orders", "stock", *fair, "--json").document
    explained(made)
    assert (made["policy"]["fairness"], made["policy"]["tenant_separator"]) == ("tenant", "/")
    assert "tenant" in quick("groups", "describe", "orders", "stock").out
    quick("groups", "update", "orders", "stock", "--fairness", "none")
    policy = live.group("orders", "stock").policy
    assert policy is not None
    assert policy.fairness is None
    refused = quick("groups", "create", "orders", "other", "--fairness", "key", code=1)
    assert 'ordering="key"' in refused.err
