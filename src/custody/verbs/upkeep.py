"""Upkeep: segments end and go by their topic's retention, parts of the journal by its own, and what is left of
transactions that timed out. A step, a transaction."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any

from custody.errors import CustodyError, TopicNotFound
from custody.model.entities import Upkeep
from custody.store.postgres import Database

logger = logging.getLogger(__name__)

EVERY = 30.0  # seconds between two rounds of a process that runs anyway
TRIES = 3
PAUSE = 0.05


def maintain(db: Database, topic: str | None, *, now: Callable[[], datetime | None]) -> list[Upkeep]:
    """All that is due, of one topic or of all, and of the journal; and what producers' transactions have left that
    timed out. Returns what was done to segments and parts, and what could not be."""
    topics = [topic] if topic is not None else [name for (name,) in db.call("maintained_topics")]
    done: list[Upkeep] = []
    for name in topics:
        try:
            done += _steps(lambda name=name: db.call_dicts("maintain", topic=name, now=now()))  # type: ignore[misc]
        except TopicNotFound:
            if topic is not None:
                raise
    done += _steps(lambda: db.call_dicts("maintain_journal", now=now()))
    while db.call("clear_transactions", now=now())[0][0]:
        pass
    return done


def _steps(step: Callable[[], list[dict[str, Any]]]) -> list[Upkeep]:
    """Step after step while there is something to do; who is in the way is given a few moments."""
    done: list[Upkeep] = []
    tries = 0
    while rows := step():
        found = Upkeep(**rows[0])
        if found.did == "busy":
            tries += 1
            if tries < TRIES:
                time.sleep(PAUSE * tries * random.uniform(0.5, 1.5))
                continue
        if found.did != "opened":  # half of a seal
            done.append(found)
        if found.did in ("held", "busy"):
            break
    return done


def keep_up(maintain: Callable[[], object], ended: threading.Event, every: float = EVERY) -> None:
    """Runs in a thread of a worker or a pipeline, until that has ended. What goes wrong is logged, and tried again."""
    while not ended.wait(every * random.uniform(0.5, 1)):
        try:
            maintain()
        except CustodyError as error:
            logger.warning("the upkeep of the log was put off: %s", error)
        except Exception:
            logger.exception("the upkeep of the log failed")
