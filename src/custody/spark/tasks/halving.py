"""Gives each row of a batch an outcome of its own, though the handler is called with many rows at once.

A call that raises publishes nothing: its rows are halved and called again, until the rows that break it are alone. Rows
are called in the order of the log, and a failure releases the later messages of its key, in the same call too. Pure:
what a call does is a parameter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Generic, NamedTuple, TypeVar

from custody.model.outcomes import Later, Outcome, outcome_of
from custody.spark.causes import cause_of, enough

CALLS = 1024
"""Most calls for one batch, enough for about eighty bad rows of 10,000. Messages left then are released."""
ELSEWHERE = 3
"""Number of messages far from the failed ones that are tried before the code is considered wrong."""

T = TypeVar("T")


class Failure(NamedTuple):
    """The outcome of a row that is not done. `cause`: the exception and its place, unless the handler decided on it."""

    outcome: Outcome
    cause: str | None = None


class Answer(NamedTuple, Generic[T]):
    """What a call made of its rows, by their numbers. A row that is in neither is done without an output."""

    failed: Mapping[int, Failure]
    outputs: Mapping[int, list[T]]
    unmet: Mapping[int, Collection[str]] = MappingProxyType({})
    """The expectations that a row does not meet."""

    def numbered(self, rows: Sequence[int]) -> Answer[T]:
        """The same, if the call had only these rows of a batch."""
        failed = {rows[row]: failure for row, failure in self.failed.items()}
        outputs = {rows[row]: made for row, made in self.outputs.items()}
        return Answer(failed, outputs, {rows[row]: names for row, names in self.unmet.items()})


@dataclass
class Outcomes(Generic[T]):
    """The outcomes of the rows of a batch: failed, left without an outcome, or done with these outputs."""

    failed: dict[int, Failure] = field(default_factory=dict)
    left: list[int] = field(default_factory=list)
    done: dict[int, list[T]] = field(default_factory=dict)
    unmet: Counter[str] = field(default_factory=Counter)
    """How many rows that are failed or done do not meet an expectation."""


@dataclass
class Halving(Generic[T]):
    """The calls of one attempt of a task. `stops`: whether an outcome releases the later messages of its key."""

    stops: Callable[[Outcome], bool]
    unproven: bool = False
    """No message was done since the start of the pipeline: ends early if nothing succeeds and enough rows fail alike,
    because the driver then considers the code wrong."""
    calls: int = CALLS
    stopped: set[Hashable] = field(default_factory=set)
    """Keys that have a message which is not done, across the batches of the task."""
    _passed: bool = False
    _causes: dict[str, int] = field(default_factory=dict)

    def of(
        self,
        keys: Sequence[Hashable | None],
        call: Callable[[Sequence[int]], Answer[T]],
        given: Mapping[int, Failure] | None = None,
    ) -> Outcomes[T]:
        """The outcomes of the rows 0, 1, … with these keys (None: without an order). `given` rows have failed before
        any call. `call` raises what the handler raises."""
        run = _Run(self, keys, call, given or {})
        run.all()
        return run.found

    @property
    def wrong(self) -> bool:
        """Whether so many rows failed alike, and no other, that the code may be wrong."""
        if not self.unproven or self._passed or len(self._causes) != 1:
            return False
        cause, times = next(iter(self._causes.items()))
        return times >= enough(cause)

    def note(self, failure: Failure | None) -> None:
        """Counts the outcome of a row that the handler has seen (None: it is done)."""
        if failure is None or failure.cause is None:
            self._passed = True
        else:
            self._causes[failure.cause] = self._causes.get(failure.cause, 0) + 1


class _Run(Generic[T]):
    """The calls for one batch."""

    def __init__(
        self,
        halving: Halving[T],
        keys: Sequence[Hashable | None],
        call: Callable[[Sequence[int]], Answer[T]],
        given: Mapping[int, Failure],
    ) -> None:
        self._halving, self._keys, self._call, self._given = halving, keys, call, given
        self._room, self._elsewhere = halving.calls, ELSEWHERE
        self._waiting: list[list[int]] = []
        self.found: Outcomes[T] = Outcomes()

    def all(self) -> None:
        self._waiting.append(list(range(len(self._keys))))
        while self._waiting:
            if self._halving.wrong:
                if self._elsewhere == 0:
                    break
                self._elsewhere -= 1
                chosen = self._taken_elsewhere()
                self._waiting.append([chosen])
            self._part(self._waiting.pop())
        for part in self._waiting:
            self._leave(part)

    def _part(self, rows: list[int]) -> None:
        """Calls the handler with those of these rows that may run, or puts their halves back."""
        free = [row for row in rows if not self._is_stopped(row)]
        self._leave([row for row in rows if self._is_stopped(row)])
        if self._room == 0:
            self._leave(free)
            return
        sound = self._sound(free)
        answer: Answer[T] = Answer({}, {})
        if sound:
            self._room -= 1
            try:
                answer = self._call(sound)
            except BaseException as error:  # also an exit, a cancelled coroutine, a panic of Rust code
                if len(sound) > 1 and not isinstance(error, Later):
                    middle = free.index(sound[len(sound) // 2])
                    self._waiting += [free[middle:], free[:middle]]
                    return
                answer = Answer(dict.fromkeys(sound, Failure(outcome_of(error), cause_of(error))), {})
        self._take(free, answer)

    def _sound(self, rows: list[int]) -> list[int]:
        """The rows to call: neither those that have failed already, nor the later ones of their keys."""
        held: set[Hashable] = set()
        sound = []
        for row in rows:
            given = self._given.get(row)
            if given is not None and self._halving.stops(given.outcome):
                held.add(self._keys[row])
            elif given is None and (self._keys[row] is None or self._keys[row] not in held):
                sound.append(row)
        return sound

    def _take(self, rows: list[int], answer: Answer[T]) -> None:
        """Records the outcomes of a call, in the order of the log: the rest of a key whose message failed is left."""
        for row in rows:
            if self._is_stopped(row):
                self._leave([row])
                continue
            failure = self._given.get(row)
            if failure is None:
                failure = answer.failed.get(row)
                self._halving.note(failure)
                self.found.unmet.update(answer.unmet.get(row, ()))
            if failure is None:
                self.found.done[row] = answer.outputs.get(row, [])
                continue
            self.found.failed[row] = failure
            if self._keys[row] is not None and self._halving.stops(failure.outcome):
                self._halving.stopped.add(self._keys[row])

    def _leave(self, rows: Sequence[int]) -> None:
        """Leaves messages without an outcome, and with them the later ones of their keys."""
        self.found.left += rows
        self._halving.stopped.update(key for row in rows if (key := self._keys[row]) is not None)

    def _is_stopped(self, row: int) -> bool:
        return self._keys[row] is not None and self._keys[row] in self._halving.stopped

    def _taken_elsewhere(self) -> int:
        """Takes a row far from those that were called last, and before which no other message of its key waits."""
        rows = [row for part in reversed(self._waiting) for row in part]
        first_of = {self._keys[row]: row for row in reversed(rows)}
        first = [row for row in rows if self._keys[row] is None or first_of[self._keys[row]] == row]
        chosen = first[len(first) * self._elsewhere // ELSEWHERE - 1]
        for part in self._waiting:
            if chosen in part:
                part.remove(chosen)
        self._waiting = [part for part in self._waiting if part]
        return chosen
