"""The outbox: an event is written in the same transaction as a business change.

An application needs only `write` (and `lock`, before it writes many keys). `Outbox` is for operators. `custody.relay`
publishes the events.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import datetime
from typing import Any
from uuid import UUID

from custody.model.codec import encode, encode_headers, require_key
from custody.model.entities import Payload
from custody.model.policy import require_zone
from custody.outbox.events import Event, EventState, Figures
from custody.outbox.operating import Outbox
from custody.store.driver_connection import run_joined
from custody.store.standalone_outbox import install
from custody.tracing import carried

__all__ = ["write", "lock", "install", "Outbox", "Event", "EventState", "Figures"]


def write(
    connection: Any,
    *,
    event_type: str,
    payload: Payload,
    destination: str | None = None,
    headers: Mapping[str, str] | None = None,
    partition_key: str | None = None,
    ordering_key: str | None = None,
    available_at: datetime | None = None,
    event_id: UUID | None = None,
) -> UUID:
    """Writes an event in the transaction of the connection (psycopg, psycopg2, Django, or a SQLAlchemy connection or
    session) and returns its id. The event exists if and only if that transaction commits.

    A `destination` without a colon is a topic of the same database, if that has all of Custody. Otherwise the part
    before the colon names the relay's publisher (`stdout:`, `https://…`, `billing:invoices`). None is the relay's
    default. Writers of one `ordering_key` wait for each other until they commit, so that its events are in the order of
    their commits.
    """
    require_key(partition_key)
    require_key(ordering_key)
    require_zone(available_at)
    kind, data = encode(payload)
    encoded = encode_headers(carried(headers))
    arguments = {
        "event_type": event_type,
        "kind": kind.decode(),
        "payload": data,
        "destination": destination,
        "headers": None if encoded is None else encoded.decode(),
        "partition_key": partition_key,
        "ordering_key": ordering_key,
        "available_at": available_at,
        "event_id": event_id,
    }
    (written,) = run_joined(connection, "outbox_add", arguments)
    return UUID(str(written[0]))


def lock(connection: Any, ordering_keys: Collection[str]) -> None:
    """Locks ordering keys until the end of the transaction. Call it before the first event of a transaction that writes
    several keys: it prevents deadlocks between such transactions."""
    for key in ordering_keys:
        require_key(key)
    run_joined(connection, "outbox_lock", {"keys": list(ordering_keys)})
