"""Isolates the messages that break a job. Only those fail.

One job runs many slices of a failed batch and says which of them failed; those are cut again, all of them in the next
job, until each message is alone. Where a job cannot leave out what fails, it is rerun in halves instead.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from custody.model.outcomes import Outcome
from custody.spark.causes import cause_in, enough
from custody.spark.faults import NotTheRows, described, fault
from custody.verbs.pipelines import BatchReport

logger = logging.getLogger(__name__)

JOBS = 256
"""Most jobs for one batch that is halved, enough for about fourteen bad messages of 100,000. Messages left then are
released."""
SLICES = 1024
"""The same for slices: enough for about thirty."""
WAYS, FEWEST = 32, 8
"""Slices of a job, and of each part in a job of many parts."""

ELSEWHERE = 3
"""Number of messages far from the failed ones that are tried before the code is considered wrong."""
SAMPLE = 13
"""Number of messages that are tried alone, one by one in the whole batch, if no slice of it has succeeded."""

Reference = tuple[int, int]
"""Partition and offset."""


class Sliced(NamedTuple):
    """The outcomes of the slices that succeeded, and by its number the error of each that did not, if it is known."""

    work: BatchReport
    broken: dict[int, Exception | None]


@dataclass
class Isolation:
    """Runs a failed batch in parts. `run` runs one job over some messages and may raise."""

    run: Callable[[list[Reference]], BatchReport]
    stopping: Callable[[], bool]
    slices: Callable[[list[list[Reference]]], Sliced] | None = None
    """Runs one job over many parts, of which those that fail are left out. None if jobs cannot do that."""
    jobs: int = JOBS
    describe: Callable[[Exception], str] = described
    unproven: bool = False
    """Ends early if nothing succeeds and enough messages fail alike: the caller then considers the code wrong."""
    blameless: bool = True
    """No part has succeeded yet, so perhaps none can, whatever the rows are."""
    passed: bool = False
    elsewhere: int = ELSEWHERE
    work: BatchReport = field(default_factory=lambda: BatchReport(exact=False))

    def of(self, references: list[Reference]) -> BatchReport:
        """The outcomes of all messages. References are sorted by key and offset, so a cut splits at most one key."""
        whole = [references] if references else []
        self._halve(whole if self.slices is None else self._slice(self.slices, whole))
        return self.work

    def _slice(
        self, run: Callable[[list[list[Reference]]], Sliced], parts: list[list[Reference]]
    ) -> list[list[Reference]]:
        """Runs parts that fail as slices. Returns those that only a job of their own can tell more about."""
        room = SLICES
        alone: list[list[Reference]] = []
        while parts:
            if self.stopping() or room <= 0:
                for part in parts:
                    self._leave(part)
                break
            before = parts
            if self.unproven and not self.passed and room < SLICES:
                tried, parts = _sample(parts)
            else:
                tried, parts = [piece for part in parts for piece in _cut(part, len(parts))], []
            room -= len(tried)
            try:
                found = run(tried)
            except Exception as error:
                if fault(error) != "row":
                    raise
                return [*alone, *before]
            self._merge(found.work, passed=len(found.broken) < len(tried))
            for number, broken in sorted(found.broken.items()):
                if len(tried[number]) > 1:
                    parts.append(tried[number])
                elif broken is None:
                    alone.append(tried[number])
                else:
                    self._blame(tried[number][0], broken)
            if self.unproven and not self.passed and self._alike():
                room = 0
        return alone

    def _halve(self, whole: list[list[Reference]]) -> None:
        """Runs parts that are known to fail in halves, a job for each."""
        parts = [(part, True) for part in reversed(whole)]
        while parts:
            part, known_to_fail = parts.pop()
            if self.jobs <= 0 or self.stopping():
                self._leave(part)
                continue
            if len(part) == 1 or not known_to_fail:
                error = self._try(part)
                if error is None:
                    continue
                if len(part) == 1:
                    self._blame(part[0], error)
                    if self.unproven and not self.passed:
                        self._look_elsewhere(parts)
                    continue
            half = len(part) // 2
            first, second = part[:half], part[half:]
            if len(first) > 1 and self._try(first) is None:
                parts.append((second, True))
            elif len(first) == 1:
                parts += [(second, False), (first, False)]
            else:
                parts += [(second, False), (first, True)]

    def _blame(self, message: Reference, error: Exception) -> None:
        """This message broke its job, alone."""
        self._require_guilt()
        text = self.describe(error)
        logger.debug("message %s broke its job: %s", message, text)
        self.work.failed[message] = Outcome("nack", error=text)
        self.work.causes[message] = cause_in(text)

    def _alike(self) -> bool:
        """Whether enough messages have failed for the caller to consider the code wrong."""
        causes = self.work.causes.values()
        return bool(causes) and len(causes) >= max(2, enough(next(iter(causes))))

    def _look_elsewhere(self, parts: list[tuple[list[Reference], bool]]) -> None:
        """Puts a few distant messages first, because bad messages may be neighbours, for example of one key."""
        if not self._alike():
            return
        if self.elsewhere == 0 or not parts:
            self.jobs = 0
            return
        self.elsewhere -= 1
        far, _ = parts[0]
        place = len(far) * self.elsewhere // ELSEWHERE
        rest = [*far[:place], *far[place + 1 :]]
        parts[:1] = [(rest, False)] if rest else []
        parts.append(([far[place]], False))

    def _try(self, part: list[Reference]) -> Exception | None:
        """The error with which the rows of this part broke their job; None if they did not. Other errors are raised."""
        self.jobs -= 1
        try:
            found = self.run(part)
        except Exception as error:
            if fault(error) != "row":
                raise
            return error
        self._merge(found, passed=True)
        return None

    def _merge(self, found: BatchReport, *, passed: bool) -> None:
        if passed:
            self.blameless, self.passed = False, True
        self.work.failed |= found.failed
        self.work.causes |= found.causes
        self.work.placed += found.placed
        self.work.kept |= found.kept
        self.work.unmet.update(found.unmet)

    def _require_guilt(self) -> None:
        """Before the first message fails, a job without messages must succeed. Otherwise no message is at fault."""
        if self.blameless:
            try:
                self.run([])
            except Exception as error:
                raise NotTheRows(f"the frame fails even without messages: {described(error)}") from error
            self.blameless = False

    def _leave(self, part: list[Reference]) -> None:
        for partition, offset in part:
            self.work.left.setdefault(partition, []).append(offset)


def _cut(part: list[Reference], parts: int) -> list[list[Reference]]:
    """A part in slices of about equal size, so many as a job with this number of parts has for each."""
    ways = min(len(part), max(FEWEST, WAYS // parts))
    ends = [len(part) * n // ways for n in range(ways + 1)]
    return [part[first:last] for first, last in pairwise(ends)]


def _sample(parts: Sequence[list[Reference]]) -> tuple[list[list[Reference]], list[list[Reference]]]:
    """Distant messages, each as a slice of its own, and the rest."""
    every = [message for part in parts for message in part]
    chosen = {len(every) * n // SAMPLE for n in range(SAMPLE)}
    rest = [message for number, message in enumerate(every) if number not in chosen]
    return [[every[number]] for number in sorted(chosen)], [rest] if rest else []
