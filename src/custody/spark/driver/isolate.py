"""Finding the messages that break a job: rerun in halves by key until each stands alone. Only they are charged."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from custody.model.outcomes import Outcome
from custody.spark.causes import cause_in, enough
from custody.spark.faults import NotTheRows, described, fault
from custody.verbs.pipelines import Work

logger = logging.getLogger(__name__)

JOBS = 256
"""Jobs that one batch may take: about fourteen bad messages of 100,000. What is left then is given back untried."""

ELSEWHERE = 3
"""Messages far from those that failed, which are tried before nothing is held to work."""

Reference = tuple[int, int]
"""Partition and offset."""


@dataclass
class Isolation:
    """Runs the parts of a batch that failed as a whole. `run` makes one job of some messages and may raise."""

    run: Callable[[list[Reference]], Work]
    stopping: Callable[[], bool]
    jobs: int = JOBS
    describe: Callable[[Exception], str] = described
    unproven: bool = False
    """Ends early if nothing goes well and enough fails alike: the caller takes that for the fault of the code."""
    blameless: bool = True
    """Nothing has gone well yet: it may be that nothing can, whatever the rows are."""
    passed: bool = False
    elsewhere: int = ELSEWHERE
    work: Work = field(default_factory=lambda: Work(exact=False))

    def of(self, references: list[Reference]) -> Work:
        """The work of all of it. The references are by key and offset, so that halves have whole keys but for one."""
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
        """Bad messages may be neighbours, of one key say: a few far away are tried next, before it is given up."""
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
        """What the rows of this part did to their job; None if all is well. Other errors get out."""
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
        """Before the first message is charged: a job over none must go well, or the fault is not a message's."""
        if self.blameless:
            try:
                self.run([])
            except Exception as error:
                raise NotTheRows(f"the frame fails without any message too: {described(error)}") from error
            self.blameless = False

    def _leave(self, part: list[Reference]) -> None:
        for partition, offset in part:
            self.work.left.setdefault(partition, []).append(offset)
