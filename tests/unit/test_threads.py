"""The threads that publish: a share for each destination."""

from __future__ import annotations

import threading
from collections.abc import Callable

from tests.waiting import wait_for

from custody.relay.threads import SHARES, Threads


class Gate:
    """Work that lasts until it is let through."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.open = threading.Event()

    def work(self, name: str, *, answered: bool = True) -> Callable[[], bool]:
        def work() -> bool:
            self.begun.append(name)
            assert self.open.wait(20)
            return answered

        return work


def answering(threads: Threads, destination: str, *, answered: bool = True) -> None:
    """Lets a destination answer once, or leave it at that."""
    threads.submit(destination, lambda: answered)
    wait_for(lambda: threads.full() == [], "it has not ended")


def test_a_destination_has_its_share_and_leaves_the_others_theirs() -> None:
    threads, gate = Threads(2), Gate()
    answering(threads, "a")
    for n in range(5):
        threads.submit("a", gate.work(f"a{n}"))
    threads.submit("b", gate.work("b0"))
    wait_for(lambda: sorted(gate.begun) == ["a0", "a1", "b0"], lambda: str(gate.begun))
    assert "a" in threads.full()
    assert threads.idle
    gate.open.set()
    threads.close()
    assert [name for name in gate.begun if name > "a1" and name < "b"] == ["a2", "a3", "a4"]
    assert threads.full() == []


def test_a_destination_gets_a_quarter_of_its_share_until_it_has_answered() -> None:
    threads, gate, other = Threads(8), Gate(), Gate()
    for n in range(10):
        threads.submit("a", gate.work(f"a{n}"))
    wait_for(lambda: len(gate.begun) == 2, lambda: str(gate.begun))
    assert threads.full() == ["a"]
    gate.open.set()
    wait_for(lambda: threads.full() == [] and len(gate.begun) == 10, lambda: str(gate.begun))
    for n in range(10):
        threads.submit("a", other.work(f"a{n}", answered=False))
    wait_for(lambda: len(other.begun) == 8, lambda: str(other.begun))
    other.open.set()
    wait_for(lambda: len(other.begun) == 10, lambda: str(other.begun))
    wait_for(lambda: threads.full() == [], "it has not ended")
    third = Gate()
    for n in range(10):
        threads.submit("a", third.work(f"a{n}"))
    assert len(threads.full()) == 1
    wait_for(lambda: len(third.begun) == 2, lambda: str(third.begun))
    third.open.set()
    threads.close()
    assert len(third.begun) == 10


def test_a_share_may_be_smaller() -> None:
    threads, gate = Threads(4), Gate()
    answering(threads, "a")
    for n in range(3):
        threads.submit("a", gate.work(f"a{n}"), share=2)
    wait_for(lambda: len(gate.begun) == 2, lambda: str(gate.begun))
    assert threads.full() == ["a"]
    gate.open.set()
    threads.close()
    assert len(gate.begun) == 3


def test_all_of_them_may_be_busy() -> None:
    threads, gate = Threads(1), Gate()
    for n in range(SHARES):
        assert threads.idle
        threads.submit(f"destination {n}", gate.work("x"))
    assert not threads.idle
    gate.open.set()
    threads.close()
    assert threads.idle
