"""Delayed messages: they are stored outside of the log until they are due, and can be listed and cancelled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC

from custody.errors import InvalidArgument
from custody.model.codec import encode_message
from custody.model.entities import Delayed, Outgoing
from custody.model.placement import Layout, place
from custody.model.policy import require_zone, seconds, seconds_or_none
from custody.store import packed
from custody.store.postgres import Database


def require_time(message: Outgoing) -> None:
    """Refuses a delayed message unless it has exactly one valid time."""
    if message.delay is not None and message.deliver_at is not None:
        raise InvalidArgument("a message has delay or deliver_at, not both", "Leave one of them out.")
    if not message.delayed:
        raise InvalidArgument("the message has no delay", "Give delay or deliver_at, or publish it at once.")
    if message.delay is not None:
        seconds(message.delay)
    require_zone(message.deliver_at)
    if message.deliver_at is not None:
        try:
            message.deliver_at.astimezone(UTC)
        except OverflowError:
            raise InvalidArgument(
                f"deliver_at cannot be {message.deliver_at}", "Give a time that is within the years 1 to 9999 in UTC."
            ) from None


DELIVER_AT = "x-custody-deliver-at"


def staged_headers(message: Outgoing) -> Mapping[str, str] | None:
    """The headers of a staged output. A delayed one has there its time, or its delay from the commit on."""
    if not message.delayed:
        return message.headers
    require_time(message)
    when = f"+{seconds(message.delay)}" if message.delay is not None else f"{message.deliver_at:%Y-%m-%dT%H:%M:%S.%f%z}"
    return {**(message.headers or {}), DELIVER_AT: when}


def publish(
    db: Database,
    topic: str,
    messages: Sequence[Outgoing],
    *,
    layout: Layout,
    producer: tuple[str, int, int] | None = None,
) -> list[Delayed]:
    """Stores the messages in one transaction: all or none."""
    if not messages:
        return []
    for message in messages:
        require_time(message)
    encoded = [encode_message(message) for message in messages]
    producer_id, epoch, sequence = producer or (None, None, None)
    rows = db.call(
        "publish_delayed",
        topic=topic,
        partitions=place(messages, layout),
        **packed.columns(encoded),
        deliver_at=[message.deliver_at for message in messages],
        delays=[seconds_or_none(message.delay) for message in messages],
        producer=producer_id,
        epoch=epoch,
        sequence=sequence,
        of=layout.partitions,
    )
    return [
        Delayed(topic=topic, partition=partition, delay_id=delay_id, deliver_at=deliver_at, duplicate=duplicate)
        for partition, delay_id, deliver_at, duplicate in rows
    ]
