"""How often a listener asks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
from tests.waiting import wait_for

from custody.remote.listening import FIRST_PAUSE, RemoteListener
from custody.wire.answers import WakeupOut

pytestmark = pytest.mark.core


class Asked:
    """Answers at once, with one token after another, and remembers when it was asked."""

    def __init__(self, answers: Iterator[WakeupOut]) -> None:
        self._answers = answers
        self.at: list[float] = []

    def __call__(self, _: str | None, __: float) -> WakeupOut:
        self.at.append(time.monotonic())
        return next(self._answers)


@pytest.fixture
def listening() -> Iterator[Callable[[Asked, Callable[[], None]], None]]:
    started: list[RemoteListener] = []
    yield lambda ask, wake: started.append(RemoteListener(ask, wake))
    for one in started:
        one.close()


def _turns() -> Iterator[WakeupOut]:
    while True:
        yield WakeupOut("a-0-0", True)
        yield WakeupOut("b-0-0", True)


def _stopping() -> Iterator[WakeupOut]:
    while True:
        yield WakeupOut("a-0-0", False)


@pytest.mark.parametrize("answers", [_turns, _stopping])
def test_servers_that_answer_at_once_without_a_real_wakeup_are_asked_less_and_less(
    listening: Callable[[Asked, Callable[[], None]], None], answers: Callable[[], Iterator[WakeupOut]]
) -> None:
    ask = Asked(answers())
    listening(ask, lambda: None)
    wait_for(lambda: len(ask.at) >= 6, "it asks")
    gaps = [later - earlier for earlier, later in zip(ask.at[1:5], ask.at[2:6], strict=True)]
    for n, gap in enumerate(gaps):  # the first question has no token, and says nothing
        assert gap >= FIRST_PAUSE * 2**n * 0.9, gaps


def test_a_real_wakeup_is_heard_without_a_pause(listening: Callable[[Asked, Callable[[], None]], None]) -> None:
    ask = Asked(WakeupOut(f"a-0-{n}", True) for n in range(1_000_000))
    woken: list[None] = []
    listening(ask, lambda: woken.append(None))
    wait_for(lambda: len(woken) >= 200, "it hears each", timeout=10)
