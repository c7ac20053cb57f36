"""What a view or a task publishes with its own change: after the commit, or in the same transaction."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any
from uuid import UUID

from django.db import connections, transaction

from custody import outbox
from custody.django.client import client
from custody.django.configuration import configuration
from custody.model.codec import decode_raw, encode_message
from custody.model.entities import Outgoing, Payload


def publish_on_commit(
    topic: str,
    payload: Payload,
    *,
    key: str | None = None,
    headers: Mapping[str, str] | None = None,
    using: str | None = None,
    robust: bool = False,
    **settings: Any,
) -> None:
    """Publishes after the commit of the current transaction, and not at all if that is rolled back; without a
    transaction at once.

    The message is **lost** if the process dies between the commit and the publish, or if Custody's database cannot be
    reached at that moment. Then the error is raised where the transaction was committed, and later callbacks of it do
    not run; with `robust` Django logs the error and goes on. `write_event` loses nothing. What cannot be published (a
    payload, a key) is refused here, before the commit. The payload is that of now: a later change of it does not count.

    `using` is the alias of your transaction. `settings` are those of `Custody.publish`, such as `delay`.
    """
    _, kind, data, _ = encode_message(Outgoing(payload, key=key, headers=headers, **settings))
    stored = decode_raw(kind.decode(), data)
    kept = None if headers is None else dict(headers)

    def publish() -> None:  # Django logs the name of a function: a partial has none
        client().publish(topic, stored, key=key, headers=kept, **settings)

    transaction.on_commit(publish, using=using, robust=robust)


def write_event(
    *,
    event_type: str,
    payload: Payload,
    destination: str | None = None,
    headers: Mapping[str, str] | None = None,
    partition_key: str | None = None,
    ordering_key: str | None = None,
    available_at: datetime | None = None,
    event_id: UUID | None = None,
    using: str | None = None,
) -> UUID:
    """Writes an event to the outbox in the current transaction of Django: it exists if and only if that commits.

    A `destination` without a colon is a topic, which gets the event exactly once. Refused outside of
    `transaction.atomic()`. `using` is the alias of the transaction (default: Custody's own database, else `default`).
    The rest is that of `custody.outbox.write`.
    """
    return outbox.write(
        connections[using or configuration().alias or "default"],
        event_type=event_type,
        payload=payload,
        destination=destination,
        headers=headers,
        partition_key=partition_key,
        ordering_key=ordering_key,
        available_at=available_at,
        event_id=event_id,
    )
