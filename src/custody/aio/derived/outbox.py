"""Functions of outbox/__init__.py for asyncio. Made by scripts/async_surface.py: do not edit."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import datetime
from typing import Any
from uuid import UUID

from custody.bridge import run
from custody.model.entities import Payload
from custody.outbox import lock as blocking_lock
from custody.outbox import write as blocking_write


async def write(
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
    return await run(
        lambda: blocking_write(
            connection,
            event_type=event_type,
            payload=payload,
            destination=destination,
            headers=headers,
            partition_key=partition_key,
            ordering_key=ordering_key,
            available_at=available_at,
            event_id=event_id,
        )
    )


async def lock(connection: Any, ordering_keys: Collection[str]) -> None:
    """Locks ordering keys until the end of the transaction. Call it before the first event of a transaction that writes
    several keys: it prevents deadlocks between such transactions."""
    return await run(lambda: blocking_lock(connection, ordering_keys))
