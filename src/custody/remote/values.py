"""Converts values for requests. Values that cannot be stored are refused here, as with a direct connection."""

from __future__ import annotations

from custody.errors import PartitionNotFound
from custody.model.entities import Outgoing
from custody.model.limits import LARGEST, SMALL
from custody.verbs.delays import require_time
from custody.wire.fields import Duration
from custody.wire.requests import MessageIn, content_of


def outgoing(message: Outgoing, topic: str | None = None) -> MessageIn:
    """A message to publish."""
    if message.delayed:
        require_time(message)
    content = content_of(message)
    require_partition(message.partition)
    return MessageIn(
        topic=topic,
        **content,
        partition=message.partition,
        priority=message.priority,
        delay=Duration.of(message.delay),
        deliver_at=message.deliver_at,
        allow_split=message.allow_split,
    )


def is_possible_offset(offset: int) -> bool:
    """Whether a request can contain this offset."""
    return 0 <= offset <= LARGEST


def require_partition(partition: int | None) -> None:
    """Refuses an impossible partition as the verb itself does. The server would refuse it as an invalid field."""
    if partition is not None and not 0 <= partition <= SMALL:
        raise PartitionNotFound(f"there is no partition {partition}", "Partitions are counted from 0.")
