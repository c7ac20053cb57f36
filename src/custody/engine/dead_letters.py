"""Dead letters: list, redrive and discard them, and replay them from a dead-letter topic."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any, Literal, TypedDict, Unpack

from custody.engine.base import Base
from custody.engine.groups import GROUP
from custody.errors import InvalidArgument
from custody.model.codec import KINDS
from custody.model.entities import DeadLetter, Replayed
from custody.model.lanes import priority_of
from custody.wire.answers import RedrivenOut
from custody.wire.fields import DryRun, Help, Name, Offset, Page, Partition, Positive, Reason
from custody.wire.messages import DeadOut
from custody.wire.verb import verb


class DeadConditions(TypedDict, total=False):
    """Selects dead messages: those that meet every given condition."""

    where_error: Annotated[str | None, Help("Only errors that match, such as 'timeout%'.", "LIKE")]
    key: Annotated[str | None, Help("Only messages of this key.")]
    partition: Annotated[Partition | None, Help("Only this partition.")]
    offsets: Annotated[Sequence[Offset] | None, Help("Only these offsets of the partition, which is then required.")]
    died_from: Annotated[datetime | None, Help("Only those that died at this time or later.")]
    died_until: Annotated[datetime | None, Help("Only those that died before this time.")]
    died_of: Annotated[str | None, Help("Only those with this reason, such as rejected.", "REASON")]


class DeadFilter(DeadConditions, total=False):
    """Conditions, and how many at most."""

    limit: Annotated[Positive | None, Help("At most this many.")]


def _filter(which: DeadFilter) -> tuple[Any, ...]:
    """The conditions in the order of the SQL type."""
    limit, offsets = which.get("limit"), which.get("offsets")
    if limit is not None and limit < 1:
        raise InvalidArgument("limit must be at least 1")
    if offsets is not None and which.get("partition") is None:
        raise InvalidArgument("offsets need a partition", "Give the partition: each partition has the same offsets.")
    chosen = {**which, "offsets": None if offsets is None else list(offsets)}
    return tuple(chosen.get(name) for name in DeadFilter.__annotations__)


class DeadLetters(Base):
    """The dead messages of groups."""

    @verb("GET", GROUP + "/dead", tag="groups", right="consume", answer=list[DeadOut])
    def dead(self, topic: str, group: str, *, limit: Page = 1000, **which: Unpack[DeadConditions]) -> list[DeadLetter]:
        """The dead letters of a group with their errors: all, or those that match the filters.

        They are ordered by partition and offset. Over HTTP at most 100,000; the list ends with the one that reaches
        16 MB of payload.
        """
        of = self._rows("topic_named", topic=topic)[0]
        filter = _filter({**which, "limit": None})[:-1]
        rows = self._rows("dead", topic=topic, group=group, filter=(*filter, limit), bytes=self._max_bytes)
        return [
            DeadLetter(
                topic=topic,
                partition=row["partition"],
                offset=row["offset"],
                key=row["key"],
                payload=self._decoding(KINDS[row["payload_kind"]], row["payload_bytes"]),
                headers=row["headers"] or {},
                attempt=row["attempts"],
                published_at=row["published_at"],
                priority=priority_of(row["partition"]) if of["starvation_limit"] is not None else None,
                topic_uid=of["uid"],
                attempts=row["attempts"],
                reason=row["reason"],
                last_error=row["last_error"],
                last_traceback=row["last_traceback"],
                errors=tuple(row["errors"]),
                died_at=row["died_at"],
                held=row["held"],
            )
            for row in rows
        ]

    @verb(
        "POST",
        GROUP + "/redrive",
        tag="groups",
        right="admin",
        answer=RedrivenOut,
        repeat="dry_run",
        example={"where_error": "timeout%", "dry_run": True},
    )
    def redrive(
        self, topic: str, group: str, *, dry_run: DryRun = False, reason: Reason = None, **which: Unpack[DeadFilter]
    ) -> list[tuple[int, int]]:
        """Makes dead messages ready again, with attempts reset: all, or those that match the filters.

        Returns the (partition, offset) of each. With `dry_run` nothing changes.
        """
        return self._settle_dead("redrive", topic, group, dry_run, reason, which)

    @verb(
        "POST",
        GROUP + "/discard",
        tag="groups",
        right="admin",
        answer=RedrivenOut,
        repeat="dry_run",
        example={"key": "SKU-123", "reason": "the order was cancelled"},
    )
    def discard(
        self, topic: str, group: str, *, dry_run: DryRun = False, reason: Reason = None, **which: Unpack[DeadFilter]
    ) -> list[tuple[int, int]]:
        """Resolves dead messages without processing them: all, or those that match the filters. This cannot be undone.

        Returns the (partition, offset) of each. With `dry_run` nothing changes.
        """
        return self._settle_dead("discard", topic, group, dry_run, reason, which)

    def _settle_dead(
        self,
        function: Literal["redrive", "discard"],
        topic: str,
        group: str,
        dry_run: bool,
        reason: str | None,
        which: DeadFilter,
    ) -> list[tuple[int, int]]:
        rows = self._rows(function, topic=topic, group=group, filter=_filter(which), dry_run=dry_run, reason=reason)
        return [(row["partition"], row["offset"]) for row in rows]

    @verb(
        "POST",
        "/messages/dlq/replay",
        tag="operating",
        right="admin",
        answer=Replayed,
        repeat=True,
        thing="/topics/{dlq_topic}",
        example={"dlq_topic": "orders-dlq", "partition": 0, "offset": 5, "target_topic": "orders"},
    )
    def replay(
        self,
        dlq_topic: Annotated[Name, Help("The dead-letter topic, such as orders-dlq.")],
        partition: Annotated[Partition, Help("The partition of the copy.")],
        offset: Annotated[Offset, Help("The offset of the copy.")],
        *,
        target_topic: Annotated[Name | None, Help("The topic, instead of the original one.", "TOPIC")] = None,
        reason: Reason = None,
    ) -> Replayed:
        """Publishes the original of a dead-letter copy again, and marks the dead message as done. Idempotent.

        It goes to its topic or to another one. A repeat publishes nothing and returns the first receipt as a duplicate.
        """
        return self._replay(dlq_topic, partition, offset, target_topic, reason, origin=None)

    def _replay(
        self, dlq_topic: str, partition: int, offset: int, target: str | None, reason: str | None, *, origin: str | None
    ) -> Replayed:
        """With `origin`, refused unless the copy names this topic as its own."""
        row = self._rows(
            "replay_dead_letter",
            dlq_topic=dlq_topic,
            partition=partition,
            offset=offset,
            target=target,
            reason=reason,
            origin=origin,
        )[0]
        self._hints.send(row["topic"])
        return Replayed(**row)
