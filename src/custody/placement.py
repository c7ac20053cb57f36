"""Which partition a message goes to: the one of its key, or one after the other."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from custody import lanes
from custody.model import Outgoing


@lru_cache(maxsize=65536)
def partition_for(key: str, partitions: int) -> int:
    """The partition of a key: the first eight bytes of its SHA-256, without the sign bit, modulo the partitions."""
    digest = hashlib.sha256(key.encode()).digest()
    return (int.from_bytes(digest[:8], "big") & 0x7FFF_FFFF_FFFF_FFFF) % partitions


class Layout(NamedTuple):
    """What one has to know of a topic to place messages in it: its partitions, and whether they are lanes."""

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
        """A partition for a message without a key: one after the other."""
        if self.priorities:
            return turn % (self.partitions // lanes.LANES) * lanes.LANES + lanes.lane_of(priority)
        if priority is not None:
            lanes.require_none(priority)
        return turn % self.partitions

    def require(self, partition: int, priority: lanes.Priority | None) -> None:
        """Refuses a priority beside a partition that is not of it."""
        if self.priorities:
            lanes.require_lane(priority, partition)
        elif priority is not None:
            lanes.require_none(priority)


def place(messages: Sequence[Outgoing], layout: Layout) -> list[int]:
    """A partition for each message: the named one, the key's, or else one after the other from a random start."""
    turn = random.randrange(layout.partitions)
    placed = []
    for message in messages:
        if message.partition is not None:
            layout.require(message.partition, message.priority)
            placed.append(message.partition)
        elif message.key is not None:
            placed.append(layout.place_key(message.key, message.priority))
        else:
            placed.append(layout.place_turn(turn, message.priority))
            turn += 1
    return placed
