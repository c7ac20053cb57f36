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

    def work(self, name: str) -> Callable[[], None]:
        def work() -> None:
            self.begun.append(name)
            assert self.open.wait(20)

        return work


def test_a_destination_has_its_share_and_leaves_the_others_theirs() -> None:
    threads, gate = Threads(2), Gate()
    for n in range(5):
        threads.submit("a", gate.work(f"a{n}"))
    threads.submit("b", gate.work("b0"))
    wait_for(lambda: sorted(gate.begun) == ["a0", "a1", "b0"], lambda: str(gate.begun))
    assert threads.full() == ["a"]
    assert threads.idle
    gate.open.set()
    threads.close()
    assert [name for name in gate.begun if name > "a1" and name < "b"] == ["a2", "a3", "a4"]
    assert threads.full() == []


def test_a_share_may_be_smaller() -> None:
    threads, gate = Threads(4), Gate()
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
