"""What a driver says of its pipeline in the database, for those who look at it: how it fares, and that it lives."""

from __future__ import annotations

import logging
import threading
from types import TracebackType

from custody.errors import CustodyError
from custody.spark.faults import described
from custody.verbs.pipelines import Drive, State

logger = logging.getLogger(__name__)

HEARTBEAT = 5.0
"""Seconds between two signs of life; a driver that has given none for 20 is taken for gone (pipeline_states)."""
_LAST_WORD = 5.0  # seconds that an ending driver waits for a database which may be down


class Report:
    """Says how a pipeline fares while the block runs, and at its end how it ended: stopped, or failed with an error.

    Everything is said again with each sign of life, so that nothing is lost while the database is away.
    """

    def __init__(self) -> None:
        self._drive: Drive | None = None
        self._state: State = "running"
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

    def drives(self, drive: Drive) -> None:
        """A new epoch has begun."""
        self._drive = drive

    def failed(self, error: str, tries: int) -> None:
        """It is tried again, for the so manieth time in a row."""
        self._state, self._error, self._tries = "retrying", error, tries
        self._changed.set()

    def goes_well(self) -> None:
        """A batch was committed, or there is none."""
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
        except CustodyError as error:  # the database is away, or this driver begins its next epoch at this moment
            logger.debug("how the pipeline fares was not noted: %s", error)
