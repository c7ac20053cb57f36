"""Whether all messages of a pipeline fail alike: then it is the code that is wrong, and no message is charged for it.

A cause is the type of an exception and the place where it was raised. Tasks name it, the driver compares.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from custody.errors import Transient
from custody.model.outcomes import Dead, Later, Outcome, Retry
from custody.verbs.pipelines import Work

MALFORMED = "malformed"
"""Of a message that did not fit the schema: the code has not seen it, so it says nothing of the code."""
PAUSED = "paused by its own pipeline: "
"""How the reason of such a pause begins. The next start of the pipeline ends it."""
MANY = 10
"""Messages that have to fail alike. Fewer are enough for what is hardly ever a message's fault."""
_ENOUGH = {
    **dict.fromkeys(("NameError", "UnboundLocalError", "ImportError", "ModuleNotFoundError", "SyntaxError",
                     "IndentationError", "NotImplementedError", "WrongResult", "TopicNotFound"), 1),
    **dict.fromkeys(("TypeError", "AttributeError"), 3),
}  # fmt: skip
_NAME = re.compile(r"\[([A-Z0-9_.]+)\]|(?:[\w]+\.)*(\w+)(?=:|$)")


class WrongResult(TypeError):
    """The handler returned what cannot be an output."""


def cause_of(error: BaseException) -> str | None:
    """What a handler raised and where; None if it said what is to be done, or met an outage. Runs in executors."""
    if isinstance(error, Dead | Later | Retry | ConnectionError | TimeoutError | Transient):
        return None  # for outages there are the backoff and the breaker
    trace, place = error.__traceback__, ""
    while trace is not None:
        place, trace = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}", trace.tb_next
    return f"{type(error).__name__} at {place}"


def cause_in(text: str) -> str:
    """The same of a job that failed, by what Spark says of it; the place is not known."""
    found = _NAME.match(text)
    return text[:60] if found is None else f"{found[1] or found[2]} in the frame"


def enough(cause: str) -> int:
    """How many messages have to fail with a cause before the code is to blame."""
    return _ENOUGH.get(cause.split()[0], MANY)


class Beginning:
    """What has become of messages since the pipeline was started, until one of them is done. Used in the driver."""

    def __init__(self) -> None:
        self.over = False
        """The code works: something was done, or it said itself what is to be done with a message."""
        self._causes: dict[tuple[int, int], str] = {}

    def wrong(self, work: Work, claimed: int) -> str | None:
        """Why the code must be wrong, by this batch of so many messages and those before it; None if it need not be."""
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
