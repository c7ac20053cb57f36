"""Priorities: each partition of a topic with priorities is five partitions (lanes) of the log, one for each."""

from __future__ import annotations

from typing import Literal

from custody.errors import InvalidArgument, NoPriorities

Priority = Literal["critical", "high", "normal", "low", "background"]
PRIORITIES: tuple[Priority, ...] = ("critical", "high", "normal", "low", "background")
WEIGHTS: dict[Priority, int] = dict(zip(PRIORITIES, (50, 25, 15, 7, 3), strict=True))
"""How many of a hundred claims each gets while all have messages."""
LANES = len(PRIORITIES)
_LANE: dict[Priority | None, int] = {None: 2, **{name: lane for lane, name in enumerate(PRIORITIES)}}


def lane_of(priority: Priority | None) -> int:
    """The lane of a priority; None means normal."""
    given: object = priority
    lane = _LANE.get(priority) if given is None or isinstance(given, str) else None
    if lane is None:
        raise InvalidArgument(f"{priority!r} is not a priority", f"It is one of: {', '.join(PRIORITIES)}.")
    return lane


def priority_of(partition: int) -> Priority:
    """The priority of a partition of the log, in a topic with priorities."""
    return PRIORITIES[partition % LANES]


def require_none(priority: Priority | None) -> None:
    """Refuses a priority other than normal for a topic without priorities."""
    if lane_of(priority) != _LANE[None]:
        raise NoPriorities(
            f"the message has the priority {priority}, but the topic has no priorities",
            "Leave the priority out, or publish to a topic that was created with priorities=True.",
        )


def require_lane(priority: Priority | None, partition: int) -> None:
    """Refuses a priority that differs from that of the given partition."""
    if priority is not None and partition % LANES != lane_of(priority):
        raise InvalidArgument(
            f"partition {partition} is for {priority_of(partition)} messages, not for {priority} ones",
            "Give the priority or the partition: each partition of a topic with priorities has one priority.",
        )
