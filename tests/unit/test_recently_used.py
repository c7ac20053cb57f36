"""Connections by address that are kept for the next use."""

from __future__ import annotations

import threading

import pytest
from tests.waiting import wait_for

from custody.relay.recently_used import RecentlyUsed


def test_the_last_ones_are_kept_and_the_others_closed() -> None:
    made: list[str] = []
    closed: list[str] = []

    def open_(address: str) -> str:
        made.append(address)
        return address.upper()

    opened = RecentlyUsed(open_, closed.append, most=2)
    for address in "abacb":
        assert opened.get(address) == address.upper()
    assert made == ["a", "b", "c", "b"]
    assert closed == ["B", "A"]
    opened.close()
    assert sorted(closed) == ["A", "B", "B", "C"]


def test_who_opens_one_holds_up_nobody_who_wants_another() -> None:
    entered, leave = threading.Event(), threading.Event()

    def open_(address: str) -> str:
        if address == "slow":
            entered.set()
            assert leave.wait(20)
        return address

    opened = RecentlyUsed(open_, lambda _: None)
    thread = threading.Thread(target=opened.get, args=["slow"])
    thread.start()
    assert entered.wait(20)
    assert opened.get("quick") == "quick"
    leave.set()
    thread.join(20)


def test_what_two_opened_at_once_is_kept_once() -> None:
    both = threading.Barrier(2)
    closed: list[object] = []

    def open_(_: str) -> object:
        both.wait(20)
        return object()

    opened: RecentlyUsed[object] = RecentlyUsed(open_, closed.append)
    found: list[object] = []
    threads = [threading.Thread(target=lambda: found.append(opened.get("a"))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    wait_for(lambda: len(closed) == 1, "the second was not closed")
    assert found[0] is found[1]
    assert closed != found[:1]


def test_what_could_not_be_opened_is_tried_again() -> None:
    answers = [OSError("not now")]

    def open_(address: str) -> str:
        if answers:
            raise answers.pop()
        return address

    opened = RecentlyUsed(open_, lambda _: None)
    with pytest.raises(OSError, match="not now"):
        opened.get("a")
    assert opened.get("a") == "a"


def test_what_is_dropped_is_closed_and_opened_anew() -> None:
    made = iter(range(10))
    closed: list[int] = []
    opened: RecentlyUsed[int] = RecentlyUsed(lambda _: next(made), closed.append)
    assert opened.get("a") == opened.get("a") == 0
    opened.drop("a")
    opened.drop("a")
    assert closed == [0]
    assert opened.get("a") == 1
    opened.close()
    assert closed == [0, 1]
