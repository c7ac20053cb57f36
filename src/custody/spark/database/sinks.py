"""The verbs of the plain sink: tasks stage messages, and one transaction on the driver publishes all or none.

Each runs over the one connection that its process keeps.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from custody.errors import CustodyError, DatabaseUnavailable
from custody.store import staging
from custody.verbs.pipelines import Sink, StagedCount

logger = logging.getLogger(__name__)


def topic(url: str, name: str) -> Sink:
    """A topic to publish to. Runs anywhere."""
    return Sink(*staging.call(url, "layout", topic=name)[0])


def open_stage(url: str, stage: str) -> None:
    """Creates the stage if it does not exist; several tasks may do so at once. Runs in a task."""
    staging.call(url, "open_stage", stage=stage)


def commit(
    url: str, stage: str, placed: Sequence[StagedCount], *, query: str | None = None, batch: int | None = None
) -> int | None:
    """Publishes what is staged, in the given order. None if this batch of the query was published before.

    Runs on the driver, in one transaction. After a lost connection the outcome is unknown; for a streaming query a
    repeat is idempotent.
    """
    arguments: dict[str, object] = {
        "query": query,
        "batch": batch,
        "stage": stage,
        "attempts": [place.attempt for place in placed],
        "topics": [place.topic_id for place in placed],
        "partitions": [place.partition for place in placed],
        "counts": [place.messages for place in placed],
        "of": [place.of for place in placed],
    }
    try:
        published = staging.call(url, "sink_commit", **arguments)[0][0]
    except DatabaseUnavailable:
        if query is None:
            raise
        # the connection may have died between two batches, long before this one
        published = staging.call(url, "sink_commit", **arguments)[0][0]
    try:
        staging.call(url, "drop_stage", stage=stage)
        staging.call(url, "hint", topics=sorted({place.topic_id for place in placed}))
    except CustodyError as error:
        # it is published, so no later error may make Spark write it again
        logger.debug("after a commit: %s", error)
    return None if published is None else int(published)


def drop_stage(url: str, stage: str) -> None:
    """Drops a stage, unless a task is still writing into it; then it stays for now. Runs on the driver."""
    staging.call(url, "drop_stage", stage=stage)
