"""The log of failed messages: each kind of error with its traceback, and not more than once a minute."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from custody.elapsed import elapsed
from custody.errors import PayloadMismatch
from custody.model.entities import Message
from custody.model.outcomes import Decision

logger = logging.getLogger(__name__)

AGAIN = 60.0
"""Seconds in which further errors of the same kind are only counted."""
_MOST = 1000
"""Kinds of errors that are remembered. A handler that raises more of them logs some of them again."""

_Kind = tuple[type[BaseException], str, int]


class FailureLog:
    """Logs what a handler raised. Errors of one kind have the same type and were raised in the same line."""

    def __init__(self, clock: Callable[[], float] = elapsed) -> None:
        self._clock = clock
        self._guard = threading.Lock()
        self._logged: dict[_Kind, tuple[float, int]] = {}
        """When each kind was logged, and how often it came since."""

    def add(self, message: Message, error: BaseException) -> None:
        """Logs an error as a warning with its traceback, or counts it. What a handler decides is no error."""
        where = f"{message.topic}/{message.partition}/{message.offset}"
        if isinstance(error, Decision):
            logger.debug("the handler raised %s on %s", type(error).__name__, where)
            return
        kind, now = _kind(error), self._clock()
        with self._guard:
            at, more = self._logged.pop(kind, (now - AGAIN, 0))
            due = now - at >= AGAIN
            self._logged[kind] = (now, 0) if due else (at, more + 1)
            if len(self._logged) > _MOST:
                self._logged.pop(next(iter(self._logged)))
        if not due:
            logger.debug("the handler failed on %s, as before", where)
            return
        before = f", and {more} times like this since it was logged last" if more else ""
        if isinstance(error, PayloadMismatch):  # which field it is says more than where that was noticed
            logger.warning("%s is dead: %s%s", where, error, before)
            return
        logger.warning("the handler failed on %s (attempt %d)%s", where, message.attempt, before, exc_info=error)


def _kind(error: BaseException) -> _Kind:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return type(error), "", 0
    return type(error), trace.tb_frame.f_code.co_filename, trace.tb_lineno
