"""Priorities: each partition of a topic that has them is five in the log, one lane for each priority."""

from __future__ import annotations

from typing import Literal

from custody.errors import InvalidArgument, NoPriorities

Priority = Literal["critical", "high", "normal", "low", "background"]
PRIORITIES: tuple[Priority, ...] = ("critical", "high", "normal", "low", "background")
WEIGHTS: dict[Priority, int] = dict(zip(PRIORITIES, (50, 25, 15, 7, 3), strict=True))
"""How often each is served in a hundred claims, if all have something to give."""
LANES = len(PRIORITIES)
_LANE: dict[Priority | None, int] = {None: 2, **{name: lane for lane, name in enumerate(PRIORITIES)}}


def lane_of(priority: Priority | None) -> int:
    """The lane of a priority; without one it is normal."""
    given: object = priority
    lane = _LANE.get(priority) if given is None or isinstance(given, str) else None
    if lane is None:
        raise InvalidArgument(f"{priority!r} is not a priority", f"It is one of: {', '.join(PRIORITIES)}.")
    return lane


def priority_of(partition: int) -> Priority:
    """The priority of a partition of the log, in a topic with priorities."""
    return PRIORITIES[partition % LANES]


def require_none(priority: Priority | None) -> None:
    """Refuses a priority for a topic that has none; normal is what all its messages are."""
    if lane_of(priority) != _LANE[None]:
        raise NoPriorities(
            f"the topic has no priorities, and the message is {priority}",
            "Leave the priority out, or publish to a topic that was created with priorities=True.",
        )


def require_lane(priority: Priority | None, partition: int) -> None:
    """Refuses a priority that is not the one of the partition which is named with it."""
    if priority is not None and partition % LANES != lane_of(priority):
        raise InvalidArgument(
            f"partition {partition} is for {priority_of(partition)} messages, not for {priority} ones",
            "Name the priority or the partition: each partition of a topic with priorities has one priority.",
        )
