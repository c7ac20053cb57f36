"""Drain: handles all messages of a group, including retries, without waiting for backoffs in real time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from custody.errors import LeaseLost
from custody.model.entities import Message
from custody.model.outcomes import OUTCOMES, Counts, outcome_of
from custody.testing.handling import Handling
from custody.testing.server import TestCustody

BUSY = 20  # `busy` answers in a row, with nothing parked, after which another client must hold the partition
AHEAD = 0.001  # seconds past the due time, because a float of seconds is not exact to the microsecond


@dataclass(frozen=True, kw_only=True)
class Drained(Counts):
    """What a drain did. `left` messages are not resolved, and `reason` says why: nothing will move them by itself.

    failed: deliveries that are to be tried again · dead: messages that became dead · moved: how far the clock was moved
    """

    moved: timedelta
    left: int
    reason: str | None
    messages: tuple[Message, ...] = field(repr=False)
    """Every message that the handler was called with, in order."""

    @property
    def resolved(self) -> bool:
        """Whether every message is done, or dead and not held."""
        return self.left == 0


def drain(
    c: TestCustody,
    topic: str,
    group: str,
    handler: Callable[[Message], Any],
    *,
    max_messages: int = 100,
    max_deliveries: int = 100_000,
) -> Drained:
    """Claims, calls the handler, settles as a worker does, and moves the clock to the next due time, until the end.

    It ends when everything is resolved, when nothing will become due (a held key, a pause, a limit), or after
    `max_deliveries`, because a handler that always raises Later would never end. Leases of other clients expire as the
    clock moves.
    """
    with Handling(handler) as call:
        run = _Run(c, topic, group, call)
        reason = run.until_the_end(max_messages, max_deliveries)
    left = c.stats(topic, group).depth
    return Drained(
        **run.counts,
        moved=run.moved,
        left=left,
        reason=(reason or "held") if left else None,
        messages=tuple(run.messages),
    )


class _Run:
    def __init__(self, c: TestCustody, topic: str, group: str, call: Handling) -> None:
        self._c, self._topic, self._group, self._call = c, topic, group, call
        self.counts: Counter[str] = Counter()
        self.moved = timedelta()
        self.messages: list[Message] = []

    def until_the_end(self, max_messages: int, max_deliveries: int) -> str | None:
        """Why messages are left, if any are: the reason of the last claim, or the limit."""
        waited, lag, stalled = False, math.inf, 0
        while len(self.messages) < max_deliveries:
            lease = self._c.claim(
                self._topic, self._group, max_messages=min(max_messages, max_deliveries - len(self.messages))
            )
            if lease:
                self._handle(lease.lease_id, lease.messages)
                waited, stalled = False, 0
                continue
            if lease.reason == "busy":
                # if messages were parked or skipped there is more to find; otherwise another client holds the partition
                stats = self._c.stats(self._topic, self._group)
                before, lag = lag, stats.lag + stats.waiting
                stalled = stalled + 1 if lag >= before else 0
                if stalled < BUSY:
                    continue
            due = self._c.next_due(self._topic, self._group)
            if due is None or lease.reason == "paused" or (waited and due <= 0):
                return None if lease.reason == "empty" else lease.reason
            since = self._c.clock.time
            self._c.clock.move(max(0.0, due) + AHEAD)
            self.moved += self._c.clock.time - since
            waited = True
        return "max_deliveries"

    def _handle(self, lease_id: Any, messages: Any) -> None:
        gone: set[int] = set()
        for message in messages:
            if message.offset in gone:
                continue  # released with an earlier message of its key
            self.messages.append(message)
            outcome = outcome_of(self._call(message))
            try:
                settled = self._c.settle(lease_id, {message.offset: outcome})
            except LeaseLost:
                self.counts["lost"] += 1
                continue
            self.counts["dead" if settled.dead else OUTCOMES[outcome.kind].counted] += 1
            gone.update(settled.released)
