"""What an operator asks and does: dead letters, redrive, rewind, blocked keys, figures, history."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from datetime import datetime
from typing import Any

from custody import coalesced, insights, redrive
from custody.engine.base import Base
from custody.errors import InvalidArgument, did_you_mean
from custody.insights import GroupFigures, HandlingTime, Server, TopicFigures
from custody.model import BlockedKey, DeadLetter, HistoryEntry, Replayed, Rewound, Stats
from custody.outbox.events import Figures as OutboxFigures
from custody.policy import Duration, seconds
from custody.redrive import DeadFilter


class Operating(Base):
    """Looking at groups, and repairing them."""

    def dead(self, topic: str, group: str, *, limit: int = 1000) -> list[DeadLetter]:
        """The dead letters of a group, with payload and errors."""
        return insights.dead(self._db, topic, group, limit=limit, max_bytes=self._max_bytes, decoding=self._decoding)

    def redrive(
        self, topic: str, group: str, *, dry_run: bool = False, reason: str | None = None, **which: Any
    ) -> list[tuple[int, int]]:
        """Dead messages become ready with a fresh budget: all, or those that a filter (see DeadFilter) picks.

        Returns (partition, offset) of each; with `dry_run` nothing changes.
        """
        chosen = dead_filter(which)
        return redrive.settle_dead(
            self._db,
            "redrive",
            topic,
            group,
            chosen,
            dry_run=dry_run,
            actor=self.worker,
            reason=reason,
            now=self._now(),
        )

    def discard(
        self, topic: str, group: str, *, dry_run: bool = False, reason: str | None = None, **which: Any
    ) -> list[tuple[int, int]]:
        """Dead messages are given up for good, with the same filters as `redrive`."""
        chosen = dead_filter(which)
        return redrive.settle_dead(
            self._db,
            "discard",
            topic,
            group,
            chosen,
            dry_run=dry_run,
            actor=self.worker,
            reason=reason,
            now=self._now(),
        )

    def replay(
        self,
        dlq_topic: str,
        partition: int,
        offset: int,
        *,
        target_topic: str | None = None,
        reason: str | None = None,
    ) -> Replayed:
        """Publishes a dead letter of `<topic>-dlq` again as the message that it was, to its topic or another one.

        The dead message counts as done. A repeat publishes nothing and returns the first receipt, as a duplicate.
        """
        replayed = redrive.replay(
            self._db,
            dlq_topic,
            partition,
            offset,
            target=target_topic,
            actor=self.worker,
            reason=reason,
            now=self._now(),
        )
        self._hints.send(replayed.topic)
        return replayed

    def rewind(
        self,
        topic: str,
        group: str,
        *,
        to_offset: int | None = None,
        to_time: datetime | None = None,
        partition: int | None = None,
        dry_run: bool = False,
        reason: str | None = None,
    ) -> list[Rewound]:
        """Everything from an offset or a time on is delivered again; leases over it are revoked."""
        return redrive.rewind(
            self._db,
            topic,
            group,
            to_offset=to_offset,
            to_time=to_time,
            partition=partition,
            dry_run=dry_run,
            actor=self.worker,
            reason=reason,
            now=self._now(),
        )

    def blocked_keys(self, topic: str, group: str, *, limit: int = 1000) -> list[BlockedKey]:
        """Keys that cannot go on, what each waits for, and how much waits behind it."""
        return insights.blocked_keys(self._db, topic, group, limit=limit)

    def release_key(self, topic: str, group: str, key: str, *, reason: str | None = None) -> int:
        """Lets a key go on past its held dead messages, which stay dead. Returns how many there were."""
        return redrive.release_key(self._db, topic, group, key, actor=self.worker, reason=reason, now=self._now())

    def skip(self, topic: str, group: str, partition: int, offset: int, *, reason: str | None = None) -> None:
        """Counts one waiting or dead message as done."""
        redrive.skip(self._db, topic, group, partition, offset, actor=self.worker, reason=reason, now=self._now())

    def stats(self, topic: str, group: str) -> Stats:
        return insights.stats(self._db, topic, group, now=self._now())

    def overview(
        self, *, timeout: Duration = "5s"
    ) -> tuple[list[TopicFigures], list[GroupFigures], list[OutboxFigures]]:
        """The figures of all topics, all groups and the outbox, at a cost that does not grow with the log."""
        topics, groups, rows = insights.figures(self._db, timeout=seconds(timeout), now=self._now())
        return topics, groups, [OutboxFigures(**row) for row in rows]

    def trace(self, topic: str, partition: int, offset: int, *, group: str | None = None) -> list[HistoryEntry]:
        """Everything that happened to one message, oldest first."""
        return insights.trace(self._db, topic, partition, offset, group=group)

    def in_flight(self, topic: str, group: str | None = None) -> dict[int, tuple[int, float | None]]:
        """For each partition how many messages are leased, and since how many seconds the oldest of them."""
        return coalesced.in_flight(self._db, topic, group, now=self._now())

    def handling_times(self, topic: str | None = None, group: str | None = None) -> list[HandlingTime]:
        """How long recent leases took, for each group: what a visibility timeout has to cover."""
        return insights.handling_times(self._db, topic, group, now=self._now())

    def server(self) -> Server:
        """The server's version, the settings that durability rests on, transactions that are open for long, and how it
        is connected to."""
        return insights.server(self._db, self._listen_url)


def dead_filter(which: Mapping[str, Any]) -> DeadFilter:
    known = [field.name for field in fields(DeadFilter)]
    for name in which:
        if name not in known:
            raise InvalidArgument(f"dead letters cannot be chosen by {name!r}", did_you_mean(name, known))
    return DeadFilter(**which)
