"""Replay: delivers one message again as it was delivered before, with the clock at the times of then."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

from custody.model.entities import HistoryEntry, Message
from custody.model.outcomes import OUTCOMES, outcome_of
from custody.testing.drain import AHEAD
from custody.testing.handling import Handling
from custody.testing.server import TestCustody
from custody.verbs.claim import Lease

EXPIRED, RELEASED = "expire", "release"
"""Ends of an attempt that no handler has decided: its worker died or hung, or was stopped."""
_RESOLVED = ("ack", "skip", "dead")
_ENDS = ("ack", "nack", "dead", "later", "skip", RELEASED, EXPIRED)
_NEW_LIFE = ("redrive", "rewind")
_EXPIRED_DEAD = "lease expired"


class Attempt(NamedTuple):
    """One delivery: when, the kind of journal entry that ended it (`ack`, `nack`, `dead`, …), and its error."""

    at: str
    outcome: str
    error: str | None


@dataclass(frozen=True, kw_only=True)
class Replay:
    """What became of the message this time."""

    attempts: tuple[Attempt, ...]
    recorded: tuple[Attempt, ...] = field(repr=False)

    @property
    def done(self) -> bool:
        """Whether the message is done now."""
        return bool(self.attempts) and self.attempts[-1].outcome in ("ack", "skip")

    @property
    def as_recorded(self) -> bool:
        """Whether every attempt ended as before, with the same error."""
        return [one[1:] for one in self.attempts] == [one[1:] for one in self.recorded]

    def report(self) -> str:
        """What happened, attempt by attempt, compared with then."""
        lines = []
        for number, now in enumerate(self.attempts):
            then = self.recorded[number] if number < len(self.recorded) else None
            same = "as recorded" if then is not None and then[1:] == now[1:] else f"recorded: {_words(then)}"
            lines.append(f"attempt {number + 1}: {_words(now)} ({same})")
        return "\n".join(lines) or "the message was not delivered: another one of its key, or a limit, is in the way"


def _words(attempt: Attempt | None) -> str:
    if attempt is None:
        return "nothing"
    return attempt.outcome if attempt.error is None else f"{attempt.outcome}, {attempt.error}"


def replay(
    c: TestCustody, topic: str, group: str, handler: Callable[[Message], Any], recorded: Sequence[Attempt]
) -> Replay:
    """Delivers the last message of the topic's first partition to the handler, at the recorded times or when it is due,
    until it is resolved or all recorded attempts have been made.

    Where a worker died, hung or was stopped, the handler is not called: the lease expires, or is released.
    """
    offset = c.topic(topic).tails[0] - 1
    with Handling(handler) as call:
        for then in recorded:
            c.clock.set(then.at)
            message, lease = _delivered(c, topic, group, offset, call)
            if message is None:
                break
            if then.outcome == EXPIRED:
                c.clock.set(lease.deadline + timedelta(seconds=AHEAD))
            elif then.outcome == RELEASED:
                lease.release()
            elif _settled(c, lease, message, call) in _RESOLVED:
                break
        if recorded and recorded[-1].outcome == EXPIRED:
            c.claim(topic, group)  # only a claim records that the lease has expired
    happened = attempts_in(c.trace(topic, 0, offset, group=group))
    return Replay(attempts=tuple(happened[: len(recorded)]), recorded=tuple(recorded))


def attempts_in(history: Iterable[HistoryEntry]) -> list[Attempt]:
    """The attempts in the history of a message in one group, of the last life that had any: a redrive or a rewind
    begins another."""
    lives: list[list[Attempt]] = [[]]
    claimed: HistoryEntry | None = None
    for entry in history:
        if entry.kind in _NEW_LIFE and lives[-1]:
            lives.append([])
        elif entry.kind == "claim":
            claimed = entry
        elif entry.kind in _ENDS and claimed is not None:
            expired = entry.kind == "dead" and entry.error == _EXPIRED_DEAD and entry.traceback is None
            lives[-1].append(Attempt(claimed.at.isoformat(), EXPIRED if expired else entry.kind, entry.error))
            claimed = None
    return next((life for life in reversed(lives) if life), [])


def _delivered(c: TestCustody, topic: str, group: str, offset: int, call: Handling) -> tuple[Message | None, Lease]:
    """The message with its lease. Earlier messages that are still to be retried are handled on the way; if nothing can
    be delivered, the clock moves to the next due time once."""
    waited = False
    while True:
        lease = c.claim(topic, group)
        for message in lease:
            if message.offset == offset:
                return message, lease
            _settled(c, lease, message, call)
            waited = False
        if lease:
            continue
        due = c.next_due(topic, group)
        if due is None or waited:
            return None, lease
        c.clock.move(max(0.0, due) + AHEAD)
        waited = True


def _settled(c: TestCustody, lease: Lease, message: Message, call: Handling) -> str:
    """Calls the handler and settles. Returns the kind of journal entry."""
    outcome = outcome_of(call(message))
    settled = c.settle(lease.lease_id, {message.offset: outcome})
    return "dead" if settled.dead else OUTCOMES[outcome.kind].entry
