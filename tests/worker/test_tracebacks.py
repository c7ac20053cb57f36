"""The end of a traceback is kept with a failed message, and shown wherever its error is."""

from __future__ import annotations

import threading
from pathlib import Path

import psycopg
import pytest
from tests.waiting import wait_for
from tests.worker.conftest import Start

import custody
from custody import Constant, Policy
from custody.model.tracebacks import LONGEST_TRACEBACK, last_lines, shortened

HERE = Path(__file__).name


def reserve(message: custody.Message) -> None:
    raise LookupError(f"no stock of {message.payload}")


def failed(live: custody.Custody, start: Start, handler: object, policy: Policy, messages: int = 1) -> None:
    live.create_topic("orders")
    live.create_group("orders", "stock", policy)
    live.publish_many("orders", list(range(messages)))
    running = start("orders", "stock", handler, concurrency=1, poll="50ms")
    wait_for(lambda: live.stats("orders", "stock").dead == messages, "every message is dead")
    running.stop()


@pytest.mark.req("V6")
def test_the_case_the_journal_and_the_view_have_the_end_of_the_traceback(
    live: custody.Custody, start: Start, database_url: str
) -> None:
    failed(live, start, reserve, Policy(max_attempts=2, backoff=Constant("0s")), messages=2)
    for letter in live.dead("orders", "stock"):
        assert letter.last_error == f"LookupError: no stock of {letter.payload}"
        assert letter.last_traceback is not None
        lines = letter.last_traceback.splitlines()
        assert lines[0] == "Traceback (most recent call last):"
        assert HERE in lines[1]  # the first frame is the user's own, none of Custody's
        assert lines[1].endswith("in reserve")
        assert lines[-1] == f"LookupError: no stock of {letter.payload}"
        entries = [entry for entry in live.trace("orders", 0, letter.offset) if entry.kind in ("nack", "dead")]
        assert [entry.kind for entry in entries] == ["nack", "dead"]
        assert {entry.traceback for entry in entries} == {letter.last_traceback}
    with psycopg.connect(database_url) as db:
        found = db.execute('SELECT last_traceback FROM custody.dead_letters ORDER BY "offset"').fetchall()
    assert [row[0] for row in found] == [letter.last_traceback for letter in live.dead("orders", "stock")]


@pytest.mark.req("V6")
def test_a_handler_that_hangs_leaves_the_stack_of_its_thread(live: custody.Custody, start: Start) -> None:
    go_on = threading.Event()

    def hang(message: custody.Message) -> None:
        go_on.wait(30)

    try:
        failed(live, start, hang, Policy(max_attempts=1, handler_timeout="50ms"))
    finally:
        go_on.set()
    (letter,) = live.dead("orders", "stock")
    assert letter.last_error == "the handler took longer than 0.05 s"
    assert letter.last_traceback is not None
    assert letter.last_traceback.startswith("Stack of the handler:")
    assert "go_on.wait(30)" in letter.last_traceback


@pytest.mark.req("V6")
def test_what_a_decision_was_made_of_is_kept_and_a_plain_decision_has_none(live: custody.Custody, start: Start) -> None:
    def decide(message: custody.Message) -> None:
        if message.payload:
            raise custody.Dead("no such SKU")
        try:
            reserve(message)
        except LookupError as error:
            raise custody.Dead("no such SKU") from error

    failed(live, start, decide, Policy(max_attempts=1), messages=2)
    first, second = live.dead("orders", "stock")
    assert first.last_traceback is not None
    assert "in reserve" in first.last_traceback
    assert second.last_traceback is None
    assert [letter.last_error for letter in (first, second)] == ["no such SKU"] * 2


@pytest.mark.req("V6")
def test_a_lease_takes_an_exception_and_the_next_error_replaces_its_traceback(live: custody.Custody) -> None:
    live.create_topic("orders")
    live.create_group("orders", "stock", Policy(max_attempts=3, backoff=Constant("0s")))
    live.publish("orders", 1)
    lease = live.claim("orders", "stock")
    try:
        reserve(lease.messages[0])
    except LookupError as error:
        lease.nack(error=error)
    lease = live.claim("orders", "stock")
    assert lease.messages[0].headers["x-custody-last-error"] == "LookupError: no stock of 1"
    lease.nack(error="by hand", requeue=False)
    (letter,) = live.dead("orders", "stock")
    assert (letter.last_error, letter.last_traceback) == ("by hand", None)
    kept = [entry.traceback for entry in live.trace("orders", 0, 0) if entry.kind == "nack"]
    assert len(kept) == 1
    assert kept[0] is not None
    assert kept[0].endswith("LookupError: no stock of 1")


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.req("V6")
def test_a_traceback_is_bounded_by_whole_lines_from_its_end() -> None:
    def deep(depth: int) -> None:
        if depth:
            deep(depth - 1)
        raise ValueError("x" * 50 if not depth else "")

    try:
        deep(100)
    except ValueError as error:
        text = last_lines(error)
    assert text is not None
    assert len(text) <= LONGEST_TRACEBACK
    assert text.endswith("ValueError: " + "x" * 50)
    try:
        raise ValueError("y" * 5000)
    except ValueError as error:
        text = last_lines(error)
    assert text is not None
    assert len(text) == LONGEST_TRACEBACK  # one long line: its end
    assert shortened("one\ntwo") == "one\ntwo"
    assert last_lines(ValueError("never raised")) is None
    try:
        raise Mute
    except Mute as error:
        text = last_lines(error)
    assert text is not None
    assert "Mute" in text
