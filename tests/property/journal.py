"""The journal folded: the state and attempts of every message of one (group, partition), from its entries alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from custody.model.lifecycle import JOURNAL, MessageState


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
            self._apply(entry)

    def _apply(self, entry: Entry) -> None:
        kind = JOURNAL[entry.kind]
        for offset in entry.offsets():
            message = self.messages[offset]
            if kind.target is not None and entry.kind != "start":
                # a rewind over what is ready already only takes its attempts away
                stays = entry.kind == "rewind" and message.state is MessageState.READY
                if not stays and not message.state.can_become(kind.target, kind.actor):
                    raise IllegalMove(f"entry {entry.number}: {entry.kind} of {offset}, which is {message.state}")
            message.state = kind.target or message.state
            if kind.attempts is not None:
                message.attempts = message.attempts + kind.attempts if kind.attempts else 0
            if message.attempts < 0:
                raise IllegalMove(f"entry {entry.number}: {entry.kind} gives {offset} {message.attempts} attempts")


def fold(entries: Iterable[Entry]) -> dict[int, Folded]:
    """The state and attempts of every message that the entries name; what they do not name was never handed out."""
    journal = Journal()
    journal.extend(entries)
    return dict(journal.messages)
