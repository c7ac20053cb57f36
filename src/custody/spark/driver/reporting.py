"""The driver's heartbeat in the database, with the state of its pipeline."""

from __future__ import annotations

import logging
import threading
from types import TracebackType

from custody.errors import CustodyError
from custody.spark.faults import described
from custody.verbs.pipelines import DriverVerbs, RunState

logger = logging.getLogger(__name__)

HEARTBEAT = 5.0
"""Seconds between two heartbeats. A driver without one for 20 seconds counts as gone (pipeline_states)."""
_LAST_WORD = 5.0  # seconds that an ending driver waits for the database, which may be down


class Report:
    """Reports the state of a pipeline while the block runs, and at its end: stopped, or failed with an error.

    Each heartbeat repeats the whole state, so that nothing is lost while the database is unavailable.
    """

    def __init__(self) -> None:
        self._drive: DriverVerbs | None = None
        self._state: RunState = "running"
        self._tries = 0
        self._error: str | None = None
        self._changed, self._ended = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._keep, name="custody report", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._state = "stopped" if error is None else "failed"
        if error is not None:
            self._error = described(error)
        self._ended.set()
        self._changed.set()
        self._thread.join(_LAST_WORD)

    def drives(self, drive: DriverVerbs) -> None:
        """Records that a new epoch has begun."""
        self._drive = drive

    def failed(self, error: str, tries: int) -> None:
        """Records a failure that is retried, with the number of failures in a row."""
        self._state, self._error, self._tries = "retrying", error, tries
        self._changed.set()

    def goes_well(self) -> None:
        """Records that a batch was committed, or that there is none."""
        if self._tries or self._state != "running":
            self._state, self._tries = "running", 0
            self._changed.set()

    def _keep(self) -> None:
        while True:
            self._changed.clear()
            ended = self._ended.is_set()
            self._say()
            if ended:
                return
            self._changed.wait(HEARTBEAT)

    def _say(self) -> None:
        if self._drive is None:
            return
        try:
            self._drive.report(self._state, tries=self._tries, error=self._error)
        except CustodyError as error:  # the database is unavailable, or this driver is just starting its next epoch
            logger.debug("the state of the pipeline was not recorded: %s", error)
