"""The verbs of the plain sink: tasks stage messages, and one transaction on the driver publishes them, or none.

Every one runs over the one connection that its process keeps.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from custody.errors import CustodyError, DatabaseUnavailable
from custody.store import staging
from custody.verbs.pipelines import Placed, Sink

logger = logging.getLogger(__name__)


def topic(url: str, name: str) -> Sink:
    """A topic to publish to. Runs anywhere."""
    return Sink(*staging.call(url, "layout", topic=name)[0])


def open_stage(url: str, stage: str) -> None:
    """Makes the stage unless it is there; several tasks may do so at once. Runs in a task."""
    staging.call(url, "open_stage", stage=stage)


def commit(
    url: str, stage: str, placed: Sequence[Placed], *, query: str | None = None, batch: int | None = None
) -> int | None:
    """Publishes what is staged, in the order given. None if this batch of the query was published before.

    Runs on the driver, and is one transaction. A lost connection leaves open whether it happened; with a query that is
    asked for again, and harmless.
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
        # it may have died between two batches, long before this one
        published = staging.call(url, "sink_commit", **arguments)[0][0]
    try:
        staging.call(url, "drop_stage", stage=stage)
        staging.call(url, "hint", topics=sorted({place.topic_id for place in placed}))
    except CustodyError as error:
        # it is published: nothing that comes later may make Spark write it again
        logger.debug("after a commit: %s", error)
    return None if published is None else int(published)


def drop_stage(url: str, stage: str) -> None:
    """Clears a stage away, unless a task still writes into it: then it goes another day. Runs on the driver."""
    staging.call(url, "drop_stage", stage=stage)
