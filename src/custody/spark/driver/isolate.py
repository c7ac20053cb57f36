"""Isolates the messages that break a job: reruns it in halves by key until each is alone. Only those fail."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from custody.model.outcomes import Outcome
from custody.spark.causes import cause_in, enough
from custody.spark.faults import NotTheRows, described, fault
from custody.verbs.pipelines import BatchReport

logger = logging.getLogger(__name__)

JOBS = 256
"""Most jobs for one batch, enough for about fourteen bad messages of 100,000. Messages left then are released."""

ELSEWHERE = 3
"""Number of messages far from the failed ones that are tried before the code is considered wrong."""

Reference = tuple[int, int]
"""Partition and offset."""


@dataclass
class Isolation:
    """Runs a failed batch in parts. `run` runs one job over some messages and may raise."""

    run: Callable[[list[Reference]], BatchReport]
    stopping: Callable[[], bool]
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
        parts = [(references, True)] if references else []
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
                    self._require_guilt()
                    logger.debug("message %s broke its job: %s", part[0], self.describe(error))
                    self.work.failed[part[0]] = Outcome("nack", error=self.describe(error))
                    self.work.causes[part[0]] = cause_in(self.describe(error))
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
        return self.work

    def _look_elsewhere(self, parts: list[tuple[list[Reference], bool]]) -> None:
        """Puts a few distant messages first, because bad messages may be neighbours, for example of one key."""
        causes = self.work.causes.values()
        if len(causes) < max(2, enough(next(iter(causes)))):
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
        self.blameless, self.passed = False, True
        self.work.failed |= found.failed
        self.work.causes |= found.causes
        self.work.placed += found.placed
        self.work.kept |= found.kept
        return None

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
