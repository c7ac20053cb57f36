"""custody dead, redrive and discard."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

import pytest
from tests.cli.conftest import Run

from custody import Constant, Custody, Outgoing, Policy


@pytest.fixture(autouse=True)
def _letters(live: Custody) -> None:
    """Four dead letters: two of key a that timed out, two of key b that were broken."""
    live.create_topic("orders")
    live.create_group("orders", "stock", Policy(max_attempts=1, backoff=Constant("0s")))
    live.publish_many("orders", [Outgoing({"n": n}, key="ab"[n % 2]) for n in range(4)])
    lease = live.claim("orders", "stock", max_messages=4)
    for message in lease:
        lease.nack(message, error="timeout after 3 s" if message.key == "a" else "broken")


@pytest.mark.req("V6")
def test_dead_letters_are_shown_with_their_errors(quick: Run, explained) -> None:
    lines = quick("dead", "orders", "stock", "--payload").out.splitlines()
    assert lines[0].split() == ["message", "key", "attempts", "died", "held", "reason", "last", "error", "payload"]
    assert len(lines) == 5
    assert "timeout after 3 s" in lines[1]
    assert '{"n":0}' in lines[1]
    letters = quick("dead", "orders", "stock", "--json", "--limit", "2").document
    explained(letters)
    assert [(d["offset"], d["key"], d["attempts"], d["last_error"]) for d in letters] == [
        (0, "a", 1, "timeout after 3 s"),
        (1, "b", 1, "broken"),
    ]
    assert letters[0]["errors"] == ["attempt 1: timeout after 3 s"]
    assert datetime.fromisoformat(letters[0]["died_at"]).tzinfo is not None
    assert "there may be more" in quick("dead", "orders", "stock", "--limit", "2").err


@pytest.mark.req("V6")
def test_the_place_and_the_traceback_of_an_error_are_shown(quick: Run, live: Custody) -> None:
    live.publish("orders", {"n": 4}, key="c")
    lease = live.claim("orders", "stock")
    try:
        lease.messages[0].payload["sku"]
    except KeyError as error:
        lease.nack(error=error)
    row = quick("dead", "orders", "stock", "--key", "c").out.splitlines()[1]
    assert re.search(r"KeyError: 'sku'\s+test_dead.py:\d+ in test_the_place", row)
    lines = quick("dead", "orders", "stock", "--key", "c", "--payload", "--traceback").out.splitlines()
    assert re.match(r"0/4  key c  max_retries_exceeded after 1 attempt, \S+ \S+: KeyError: 'sku'$", lines[0])
    assert lines[1:3] == ['  {"n":4}', "    Traceback (most recent call last):"]
    assert lines[-1] == "    KeyError: 'sku'"
    timeline = quick("trace", "orders", "0", "4").out.splitlines()
    assert timeline[-1] == "      KeyError: 'sku'"


@pytest.mark.req("V8", "N4")
def test_a_redrive_is_tried_dry_then_confirmed_then_journalled(quick: Run, live: Custody, explained) -> None:
    which = ("redrive", "orders", "stock", "--where-error", "timeout%")
    dry = quick(*which, "--dry-run", "--json").document
    explained(dry)
    assert dry == {
        "topic": "orders",
        "group": "stock",
        "dry_run": True,
        "count": 2,
        "messages": [{"partition": 0, "offset": 0}, {"partition": 0, "offset": 2}],
    }
    lines = quick(*which, "--dry-run").out.splitlines()
    assert ['{"n":0}' in lines[1], '{"n":2}' in lines[2]] == [True, True]  # samples
    assert lines[-1] == "2 dead messages would be redriven"
    refused = quick(*which, code=2)
    assert "Redrive 2 dead messages of orders/stock?" in refused.err
    assert live.stats("orders", "stock").dead == 4

    assert quick(*which, "--yes", "--reason", "the network is back").out == "2 dead messages redriven\n"
    assert live.stats("orders", "stock").dead == 2
    entry = live.trace("orders", 0, 2)[-1]
    assert (entry.kind, entry.error) == ("redrive", "the network is back")
    assert entry.worker is not None
    assert "@" in entry.worker  # who: user@host
    assert live.claim("orders", "stock").messages[0].attempt == 1  # a fresh budget
    assert quick(*which).out == "0 dead messages redriven\n"  # nothing to confirm


@pytest.mark.req("V8", "N4")
@pytest.mark.parametrize(
    ("filters", "offsets"),
    [
        (("--key", "b"), [1, 3]),
        (("--partition", "0", "--offset", "1", "--offset", "2"), [1, 2]),
        (("--limit", "1"), [0]),
        (("--died-from", "1h"), [0, 1, 2, 3]),
        (("--died-until", (datetime.now(UTC) - timedelta(days=1)).isoformat()), []),
    ],
)
def test_the_filters(quick: Run, filters: tuple[str, ...], offsets: list[int]) -> None:
    assert [letter["offset"] for letter in quick("dead", "orders", "stock", *filters, "--json").document] == offsets
    found = quick("redrive", "orders", "stock", "--dry-run", "--json", *filters).document
    assert [message["offset"] for message in found["messages"]] == offsets


def test_a_discard_needs_a_confirmation(quick: Run, live: Custody) -> None:
    assert "Discard 2 dead messages" in quick("discard", "orders", "stock", "--key", "a", code=2).err
    assert live.stats("orders", "stock").dead == 4
    done = quick("discard", "orders", "stock", "--key", "a", "--yes", "--reason", "test data", "--json").document
    assert done["count"] == 2
    assert live.stats("orders", "stock").dead == 2
    assert live.trace("orders", 0, 0)[-1].error == "test data"


def test_wrong_filters_are_refused(quick: Run) -> None:
    assert "is not a time" in quick("redrive", "orders", "stock", "--died-from", "5", code=2).err
    assert quick("redrive", "orders", "stock", "--offset", "1", "--json", code=1).error["code"] == "invalid_argument"
    assert quick("dead", "orders", "nobody", "--json", code=1).error["code"] == "group_not_found"


@pytest.mark.req("G10")
def test_a_dead_letter_topic_from_the_policy_to_the_replay(quick: Run, live: Custody, explained) -> None:
    quick("groups", "update", "orders", "stock", "--dead-letter", "topic")
    assert quick("groups", "describe", "orders", "stock", "--json").document["policy"]["dead_letter"] == "topic"
    quick("groups", "create", "orders", "audit", "--dead-letter", "topic", "--max-attempts", "1", "--start", "latest")
    assert [topic["name"] for topic in quick("topics", "list", "--json").document] == ["orders", "orders-dlq"]
    live.redrive("orders", "stock")
    live.claim("orders", "stock", max_messages=4).nack(error="still broken")

    assert quick("topics", "describe", "orders-dlq", "--json").document["topic"]["message_count"] == 4
    quick("groups", "create", "orders-dlq", "repair")
    copies = quick("consume", "orders-dlq", "repair", "--no-ack", "--json").documents
    assert [copy["payload"] for copy in copies] == [{"n": n} for n in range(4)]
    assert copies[2]["headers"]["x-custody-dlq-reason"] == "max_retries_exceeded"
    consumed = quick("consume", "orders-dlq", "repair", "--max", "2", "--json").documents
    assert [(message["offset"], message["attempt"]) for message in consumed] == [(0, 1), (1, 1)]

    replayed = quick("replay", "orders-dlq", "0", "2", "--reason", "fixed", "--json").document
    explained(replayed)
    assert replayed == {"topic": "orders", "partition": 0, "offset": 4, "duplicate": False, "resolved": True}
    assert quick("replay", "orders-dlq", "0", "2").out == "orders-dlq/0/2 was replayed before, as orders/0/4\n"
    assert live.trace("orders", 0, 2)[-1].error == "fixed"
    assert live.topic("orders").message_count == 5

    quick("topics", "create", "elsewhere")
    live.discard("orders", "stock", partition=0, offsets=[3])
    answer = quick("replay", "orders-dlq", "0", "3", "--to", "elsewhere")
    assert answer.out == "orders-dlq/0/3 replayed as elsewhere/0/0\n"
    assert "no longer dead" in answer.err


def test_letters_are_found_by_their_reason(quick: Run, live: Custody) -> None:
    live.publish("orders", 5)
    live.claim("orders", "stock").nack(error="bad", requeue=False)
    filtered = ("orders", "stock", "--died-of", "rejected", "--json")
    assert [letter["offset"] for letter in quick("dead", *filtered).document] == [4]
    assert quick("redrive", *filtered, "--dry-run").document["count"] == 1
    assert quick("discard", *filtered, "--yes").document["count"] == 1
    assert len(live.dead("orders", "stock")) == 4


@pytest.mark.req("G10")
def test_a_dead_letter_topic_is_refused_in_words(quick: Run) -> None:
    quick("groups", "update", "orders", "stock", "--dead-letter", "topic")
    assert quick("topics", "delete", "orders-dlq", "--yes", "--json", code=1).error["code"] == "conflict"
    refused = quick("groups", "create", "orders-dlq", "g", "--dead-letter", "topic", "--json", code=1).error
    assert refused["code"] == "invalid_argument"
    assert refused["remedy"] == "Use dead_letter = keep for its groups."
    assert quick("replay", "orders-dlq", "0", "7", "--json", code=1).error["code"] == "offset_out_of_range"
    assert quick("replay", "nowhere", "0", "0", "--json", code=1).error["code"] == "topic_not_found"
    assert (
        "'elsewhere' is not one of"
        in quick("groups", "update", "orders", "stock", "--dead-letter", "elsewhere", code=2).err
    )
