"""custody publish --delay, custody delayed, custody transactions."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest
from tests.cli.conftest import Run

from custody import Custody, Outgoing


@pytest.fixture(autouse=True)
def _topic(live: Custody) -> None:
    live.create_topic("orders")


@pytest.mark.req("G15")
def test_published_later_listed_and_cancelled(quick: Run, live: Custody, explained) -> None:
    said = quick("publish", "orders", '{"n": 1}', "--key", "a", "--delay", "1h").out
    (first,) = live.delayed("orders")
    assert said == f"1 message of orders delayed until {first.deliver_at:%FT%TZ} (delay id {first.delay_id})\n"
    document = quick("publish", "orders", "2", "3", "--deliver-at", "2040-01-31T12:00:00Z", "--json").document
    explained(document)
    assert (document["published"], len(document["delayed"])) == (0, 2)
    listed = quick("delayed", "list", "orders", "--json").document
    explained(listed)
    assert [entry["payload"] for entry in listed] == [{"n": 1}, 2, 3]
    assert datetime.fromisoformat(listed[1]["deliver_at"]) == datetime(2040, 1, 31, 12, tzinfo=UTC)
    assert '{"n":1}' in (shown := quick("delayed", "list", "orders", "--limit", "1")).out
    assert "3 messages in all" in shown.err
    cancelled = quick("delayed", "cancel", "orders", str(first.delay_id), "--json").document
    explained(cancelled)
    assert cancelled == {"topic": "orders", "cancelled": [first.delay_id]}
    again = quick("delayed", "cancel", "orders", str(listed[1]["delay_id"]), str(first.delay_id), code=1)
    assert "1 message had been cancelled before this" in again.err
    assert "delivered or cancelled already" in again.err
    assert [waiting.payload for waiting in live.delayed("orders")] == [3]
    assert "Topic orders has no delayed messages." in quick("delayed", "list", "orders", "--key", "nobody").out


def test_envelopes_may_say_when(quick: Run, live: Custody) -> None:
    lines = [
        {"payload": 1},
        {"payload": 2, "delay": "1h"},
        {"payload": 3, "deliver_at": "2040-01-01T00:00:00Z"},
        {"payload": 4},
    ]
    said = quick("publish", "orders", "--envelope", stdin="".join(json.dumps(line) + "\n" for line in lines)).out
    assert said == "published 2 messages; 2 messages of orders delayed\n"
    assert [message.payload for message in live.read("orders")] == [1, 4]
    assert [waiting.payload for waiting in live.delayed("orders")] == [2, 3]


@pytest.mark.parametrize(
    ("arguments", "said", "code"),
    [
        (["--delay", "soon"], "not a duration", 2),
        (["--deliver-at", "tomorrow"], "not a time", 2),
        (["--delay", "1s", "--deliver-at", "2040-01-01"], "cannot be combined", 2),
    ],
)
def test_a_bad_time_is_refused(quick: Run, live: Custody, arguments: list[str], said: str, code: int) -> None:
    assert said in quick("publish", "orders", "1", *arguments, code=code).err
    assert live.delayed_count("orders") == 0


@pytest.mark.parametrize(
    "bad", [{"deliver_at": "soon"}, {"delay": "soon"}, {"delay": "1s", "deliver_at": "2040-01-01T00:00:00Z"}]
)
def test_a_bad_time_in_an_envelope_is_refused(quick: Run, live: Custody, bad: dict[str, str]) -> None:
    quick("publish", "orders", json.dumps({"payload": 1, **bad}), "--envelope", code=1)
    assert live.delayed_count("orders") == 0


@pytest.mark.req("G12")
def test_open_transactions_are_listed_and_aborted(quick: Run, live: Custody, explained) -> None:
    assert quick("transactions", "list").out == "No transaction is open.\n"
    tx = live.init_producer("billing").transaction()
    live.transactions.add(tx.transaction_id, "orders", [Outgoing(1), Outgoing(2)])
    assert "billing" in quick("transactions", "list").out
    (listed,) = quick("transactions", "list", "--json").document
    explained(listed)
    assert (listed["transaction_id"], listed["messages"]) == (str(tx.transaction_id), 2)
    aborted = quick("transactions", "abort", listed["transaction_id"], "--reason", "stuck", "--json").document
    explained(aborted)
    assert aborted["changed"] is True
    assert "was aborted before" in quick("transactions", "abort", listed["transaction_id"]).out
    assert "transaction_not_found" in quick("transactions", "abort", "0" * 32, "--json", code=1).err
