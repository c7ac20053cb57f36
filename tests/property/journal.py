"""The journal folded: the state and attempts of every message of one (group, partition), from its entries alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from custody.lifecycle import JOURNAL, Actor, MessageState

BY_OPERATOR = frozenset({"redrive", "rewind", "skip", "discard", "replay", "free", "drop"})
"""The kinds of entries that an operator causes, or a retention of his; everything else is a worker's."""


@dataclass(frozen=True)
class Entry:
    """What the fold needs of a journal row: `ranges` are the offsets, as half-open pairs in rising order."""

    number: int
    kind: str
    ranges: tuple[tuple[int, int], ...]

    def offsets(self) -> Iterator[int]:
        for lower, upper in self.ranges:
            yield from range(lower, upper)


@dataclass
class Folded:
    state: MessageState = MessageState.READY
    attempts: int = 0


class IllegalMove(AssertionError):
    """The journal says that a message made a move which the lifecycle does not know."""


@dataclass
class Journal:
    """A fold that goes on: give it the entries of one (group, partition) in the order of their numbers."""

    messages: defaultdict[int, Folded] = field(default_factory=lambda: defaultdict(Folded))
    last: int = 0

    def extend(self, entries: Iterable[Entry]) -> None:
        """Applies the entries. Raises IllegalMove at the first one that no lifecycle allows."""
        for entry in entries:
            if entry.number <= self.last:
                raise ValueError(f"entry {entry.number} after {self.last}: the journal is folded in order")
            self.last = entry.number
            if entry.kind in JOURNAL:
                self._apply(entry)

    def _apply(self, entry: Entry) -> None:
        target, count = JOURNAL[entry.kind]
        actor = Actor.OPERATOR if entry.kind in BY_OPERATOR else Actor.WORKER
        if entry.kind == "pass":
            actor = Actor.BINDING
        for offset in entry.offsets():
            message = self.messages[offset]
            if target is not None and entry.kind != "start":
                # a rewind over what is ready already only takes its attempts away
                stays = entry.kind == "rewind" and message.state is MessageState.READY
                if not stays and not message.state.can_become(target, actor):
                    raise IllegalMove(f"entry {entry.number}: {entry.kind} of {offset}, which is {message.state}")
            message.state = target or message.state
            if count is not None:
                message.attempts = message.attempts + count if count else 0
            if message.attempts < 0:
                raise IllegalMove(f"entry {entry.number}: {entry.kind} gives {offset} {message.attempts} attempts")


def fold(entries: Iterable[Entry]) -> dict[int, Folded]:
    """The state and attempts of every message that the entries name; what they do not name was never handed out."""
    journal = Journal()
    journal.extend(entries)
    return dict(journal.messages)
