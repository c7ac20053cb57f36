"""The partition of a message: that of its key, or round-robin."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from custody.errors import KeySplit, NoPriorities, TopicChanged
from custody.model import lanes
from custody.model.entities import Outgoing


@lru_cache(maxsize=65536)
def partition_for(key: str, partitions: int) -> int:
    """The partition of a key: the first eight bytes of its SHA-256, without the sign bit, modulo `partitions`."""
    digest = hashlib.sha256(key.encode()).digest()
    return (int.from_bytes(digest[:8], "big") & 0x7FFF_FFFF_FFFF_FFFF) % partitions


PLACED_WRONGLY = (TopicChanged, NoPriorities, KeySplit)
"""Errors of messages that were placed by an outdated layout. With the current layout they may occur too."""


class Layout(NamedTuple):
    """What is needed to place messages in a topic: the number of its partitions, and whether it has priorities."""

    partitions: int
    priorities: bool = False

    def place_key(self, key: str, priority: lanes.Priority | None = None) -> int:
        """The partition of a key."""
        if self.priorities:
            return partition_for(key, self.partitions // lanes.LANES) * lanes.LANES + lanes.lane_of(priority)
        if priority is not None:
            lanes.require_none(priority)
        return partition_for(key, self.partitions)

    def place_turn(self, turn: int, priority: lanes.Priority | None = None) -> int:
        """A partition for a message without a key: round-robin."""
        if self.priorities:
            return turn % (self.partitions // lanes.LANES) * lanes.LANES + lanes.lane_of(priority)
        if priority is not None:
            lanes.require_none(priority)
        return turn % self.partitions

    def require(
        self, partition: int, priority: lanes.Priority | None, key: str | None = None, *, allow_split: bool = False
    ) -> None:
        """Refuses a partition that does not belong to the priority or to the key."""
        if self.priorities:
            lanes.require_lane(priority, partition)
        elif priority is not None:
            lanes.require_none(priority)
        if key is None or allow_split:
            return
        own = self.place_key(key, lanes.priority_of(partition) if self.priorities else None)
        if own != partition and 0 <= partition < self.partitions:  # the database refuses one that does not exist
            raise KeySplit(
                f"the key {key!r} belongs to partition {own}, and the message names partition {partition}:"
                " a key in two partitions has no order",
                "Leave the partition out, or use allow_split if the key needs no order.",
            )


def place(messages: Sequence[Outgoing], layout: Layout) -> list[int]:
    """A partition for each message: the given one, the key's, or else round-robin from a random start."""
    turn = random.randrange(layout.partitions)
    placed = []
    for message in messages:
        if message.partition is not None:
            layout.require(message.partition, message.priority, message.key, allow_split=message.allow_split)
            placed.append(message.partition)
        elif message.key is not None:
            placed.append(layout.place_key(message.key, message.priority))
        else:
            placed.append(layout.place_turn(turn, message.priority))
            turn += 1
    return placed
