"""Events of an outbox, their states, and figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any
from uuid import UUID

import msgspec

from custody.model.codec import KINDS, decode
from custody.model.entities import Payload


class EventState(StrEnum):
    """The states of an event. Only a replay leaves PUBLISHED and DEAD."""

    PENDING = "PENDING"
    CLAIMED = "CLAIMED"
    PUBLISHED = "PUBLISHED"
    DEAD = "DEAD"

    def may_become(self, other: EventState) -> bool:
        return other in _MOVES[self]


_MOVES: Mapping[EventState, frozenset[EventState]] = {
    EventState.PENDING: frozenset({EventState.CLAIMED}),
    EventState.CLAIMED: frozenset({EventState.PUBLISHED, EventState.PENDING, EventState.DEAD}),
    EventState.PUBLISHED: frozenset({EventState.PENDING}),
    EventState.DEAD: frozenset({EventState.PENDING}),
}


def without_secrets(destination: str) -> str:
    """A destination for logs, metrics and errors: without the parts of a URL that may be secret (user and password, the
    query, and the fragment unless it is the topic of another Custody)."""
    scheme, found, rest = destination.partition("://")
    if not found:
        return destination
    place, _, fragment = rest.partition("#")
    host, slash, path = place.partition("?")[0].partition("/")
    topic = f"#{fragment}" if scheme.startswith("custody+") and fragment else ""
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}{topic}"


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One event as an operator sees it. A claim past its deadline counts as expired, even if that is not recorded
    yet."""

    id: int
    event_id: UUID
    event_type: str
    destination: str | None
    payload: Payload
    headers: dict[str, str]
    partition_key: str | None
    ordering_key: str | None
    created_at: datetime
    status: EventState
    attempts: int
    available_at: datetime
    claimed_at: datetime | None
    claimed_by: str | None
    expires_at: datetime | None
    published_at: datetime | None
    updated_at: datetime
    last_error: str | None
    replays: int


def event_of(row: Mapping[str, Any]) -> Event:
    values = {**row, "status": EventState(row["status"]), "headers": row["headers"] or {}}
    values["payload"] = decode(KINDS[values.pop("payload_kind")], values.pop("payload_bytes"))
    return Event(**values)


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The figures of one destination. `published_recently` and `died_recently` are for the window (default: a minute);
    `failures` counts the attempts so far for events that are not published."""

    destination: str | None
    backlog: int
    due: int
    retrying: int
    claimed: int
    dead: int
    oldest_pending: datetime | None
    published_recently: int
    died_recently: int
    failures: int
