"""Upkeep: seals and drops segments by the retention of their topics, drops parts of the journal by its own, and removes
the rest of transactions that timed out and the states of keys that have expired. Each step is a transaction."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable
from typing import Any

from custody import bridge
from custody.errors import CustodyError, PermissionDenied, TopicNotFound
from custody.model.entities import Upkeep
from custody.store.postgres import Database

logger = logging.getLogger(__name__)

EVERY = 30.0  # seconds between two rounds
TRIES = 3
PAUSE = 0.05


def maintain(db: Database, topic: str | None) -> list[Upkeep]:
    """Does all upkeep that is due, of one topic or of all, and of the journal; and removes the rest of transactions
    that timed out, and states of keys that have expired. Returns what was done, and what could not be done."""
    topics = [topic] if topic is not None else [name for (name,) in db.call("maintained_topics")]
    done: list[Upkeep] = []
    for name in topics:
        try:
            done += _steps(lambda name=name: db.call_dicts("maintain", topic=name))  # type: ignore[misc]
        except TopicNotFound:
            if topic is not None:
                raise
    done += _steps(lambda: db.call_dicts("maintain_journal"))
    while db.call("clear_transactions")[0][0]:
        pass
    while db.call("clear_key_states")[0][0]:
        pass
    return done


def _steps(step: Callable[[], list[dict[str, Any]]]) -> list[Upkeep]:
    """Repeats a step while there is something to do. If it meets a lock, it is retried a few times."""
    done: list[Upkeep] = []
    tries = 0
    while rows := step():
        found = Upkeep(**rows[0])
        if found.did == "busy":
            tries += 1
            if tries < TRIES:
                bridge.pause(PAUSE * tries * random.uniform(0.5, 1.5))
                continue
        if found.did != "opened":  # the first half of a seal
            done.append(found)
        if found.did in ("held", "busy"):
            break
    return done


def keep_up(maintain: Callable[[], object], ended: threading.Event, every: float = EVERY) -> None:
    """Runs upkeep regularly in a thread of a worker, pipeline or server, until that ends. Errors are logged. A role
    that may not do it leaves it to others."""
    while not ended.wait(every * random.uniform(0.5, 1)):
        try:
            maintain()
        except PermissionDenied:
            logger.warning("this role of the database may not do upkeep: run `custody maintain --every 30s` as another")
            return
        except CustodyError as error:
            logger.warning("the upkeep of the log was postponed: %s", error)
        except Exception:
            logger.exception("the upkeep of the log failed")
