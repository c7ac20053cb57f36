"""custody dead, redrive and discard."""

from __future__ import annotations

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
def test_dead_letters_are_shown_with_their_errors(cli: Run, quick: Run, explained) -> None:
    lines = cli("dead", "orders", "stock", "--payload").out.splitlines()
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


@pytest.mark.req("V8", "N4")
def test_a_redrive_is_tried_dry_then_confirmed_then_journalled(cli: Run, quick: Run, live: Custody, explained) -> None:
    which = ("redrive", "orders", "stock", "--where-error", "timeout%")
    dry = cli(*which, "--dry-run", "--json").document
    explained(dry)
    assert dry == {
        "topic": "orders",
        "group": "stock",
        "dry_run": True,
        "count": 2,
        "messages": [{"partition": 0, "offset": 0}, {"partition": 0, "offset": 2}],
    }
    assert quick(*which, "--dry-run").out.splitlines()[-1] == "2 dead messages would be redriven"
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
    found = quick("redrive", "orders", "stock", "--dry-run", "--json", *filters).document
    assert [message["offset"] for message in found["messages"]] == offsets


def test_a_discard_needs_a_confirmation(cli: Run, quick: Run, live: Custody) -> None:
    assert "Discard 2 dead messages" in cli("discard", "orders", "stock", "--key", "a", code=2).err
    assert live.stats("orders", "stock").dead == 4
    done = quick("discard", "orders", "stock", "--key", "a", "--yes", "--reason", "test data", "--json").document
    assert done["count"] == 2
    assert live.stats("orders", "stock").dead == 2
    assert live.trace("orders", 0, 0)[-1].error == "test data"


def test_wrong_filters_are_refused(quick: Run) -> None:
    assert "is not a time" in quick("redrive", "orders", "stock", "--died-from", "5", code=2).err
    assert quick("redrive", "orders", "stock", "--offset", "1", "--json", code=1).error["code"] == "invalid_argument"
    assert quick("dead", "orders", "nobody", "--json", code=1).error["code"] == "group_not_found"
