"""Detects that all messages of a pipeline fail alike: then the code is wrong, and no failure is counted.

A cause is the type of an exception and the line that raised it. Tasks report causes, and the driver compares them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from custody.errors import Transient
from custody.model.outcomes import Decision, Outcome
from custody.verbs.pipelines import BatchReport

MALFORMED = "malformed"
"""Cause of a message that did not fit the schema. The code has not seen it, so it says nothing about the code."""
PAUSED = "paused by its own pipeline: "
"""Prefix of the reason of such a pause. The next start of the pipeline resumes the group."""
MANY = 10
"""Number of messages that must fail alike. Fewer are enough for errors that a message hardly ever causes."""
_ENOUGH = {
    **dict.fromkeys(("NameError", "UnboundLocalError", "ImportError", "ModuleNotFoundError", "SyntaxError",
                     "IndentationError", "NotImplementedError", "WrongResult", "TopicNotFound"), 1),
    **dict.fromkeys(("TypeError", "AttributeError"), 3),
}  # fmt: skip
_NAME = re.compile(r"\[([A-Z0-9_.]+)\]|(?:[\w]+\.)*(\w+)(?=:|$)")


class WrongResult(TypeError):
    """The handler returned a value that cannot be an output."""


def cause_of(error: BaseException) -> str | None:
    """What a handler raised and where; None for a decision of the handler and for an outage. Runs in executors."""
    if isinstance(error, Decision | ConnectionError | TimeoutError | Transient):
        return None  # the backoff and the breaker handle outages
    trace, place = error.__traceback__, ""
    while trace is not None:
        place, trace = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}", trace.tb_next
    return f"{type(error).__name__} at {place}"


def cause_in(text: str) -> str:
    """The cause of a failed job, from Spark's text. The line is not known."""
    found = _NAME.match(text)
    return text[:60] if found is None else f"{found[1] or found[2]} in the frame"


def enough(cause: str) -> int:
    """How many messages must fail with this cause before the code is considered wrong."""
    return _ENOUGH.get(cause.split()[0], MANY)


class Beginning:
    """The outcomes since the start of the pipeline, until one message is done. Used in the driver."""

    def __init__(self) -> None:
        self.over = False
        """The code works: a message was done, or the handler decided what to do with one."""
        self._causes: dict[tuple[int, int], str] = {}

    def wrong(self, work: BatchReport, claimed: int) -> str | None:
        """The error that shows that the code is wrong, given this batch of `claimed` messages; else None."""
        left = sum(map(len, work.left.values()))
        if self.over or len(work.failed) + left < claimed or _decided(work.failed, work.causes):
            self.over = True
            return None
        self._causes |= {message: cause for message, cause in work.causes.items() if cause != MALFORMED}
        different = set(self._causes.values())
        if len(different) != 1 or len(self._causes) < enough(min(different)):
            return None
        error = next(work.failed[message].error for message in work.failed if work.causes[message] != MALFORMED)
        place = min(different).partition(" ")[2]
        return f"{error} ({place})"


def _decided(failed: Mapping[tuple[int, int], Outcome], causes: Mapping[tuple[int, int], str]) -> bool:
    return any(message not in causes for message in failed)
