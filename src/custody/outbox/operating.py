"""Verbs for operators of an outbox, in a database with all of Custody or with the outbox alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from types import TracebackType
from typing import Any, Self
from uuid import UUID

from custody.errors import EventNotFound
from custody.model.policy import Duration, seconds
from custody.outbox.conformance import Finding, findings
from custody.outbox.events import Event, EventState, Figures, event_of
from custody.store import standalone_outbox
from custody.store.postgres import Connection, Database


class Outbox:
    """The outbox of a database. Close it, or use it as a context manager."""

    def __init__(
        self, url: str, *, actor: str | None = None, clock: Callable[[], datetime] | None = None, pool_size: int = 4
    ) -> None:
        self._db = Database(url, pool_size=pool_size).acting(actor, clock).require(self._check)

    def _check(self, connection: Connection) -> int:
        whole, release = standalone_outbox.check(connection)
        self.alone = not whole
        return release

    def close(self) -> None:
        self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def events(self, *, limit: int | None = 1000, **which: Any) -> list[Event]:
        """The events that match a filter, oldest first. See `replay` for the filters."""
        rows = self._db.call_dicts("outbox_chosen", limit=limit, **_filter(**which))
        return [event_of(row) for row in rows]

    def event(self, event_id: UUID) -> Event:
        """One event, or `EventNotFound`."""
        found = self.events(ids=[event_id])
        if not found:
            raise EventNotFound(
                f"the outbox has no event {event_id}", "It may have been pruned; see the list of events."
            )
        return found[0]

    def replay(
        self,
        *,
        states: Sequence[EventState | str] = (EventState.DEAD,),
        limit: int | None = None,
        dry_run: bool = False,
        reason: str | None = None,
        **which: Any,
    ) -> list[UUID]:
        """Publishes DEAD or PUBLISHED events again, in the order of their keys and with a fresh budget of attempts.

        The filters are `states`, `ids`, `since` and `until` (the time of the last change), `event_type`, `destination`,
        `ordering_key` and `error` (a LIKE pattern). Returns the ids. With `dry_run` nothing changes. Events of a
        deleted topic are left out: see `stranded`.
        """
        rows = self._db.call(
            "outbox_replay",
            limit=limit,
            dry_run=dry_run,
            reason=reason,
            **_filter(states=states, **which),
        )
        return [event_id for (event_id,) in rows]

    def stranded(self, *, states: Sequence[EventState | str] = (EventState.DEAD,), **which: Any) -> list[UUID]:
        """The events that a replay with this filter leaves out, because their topics are deleted."""
        rows = self._db.call_dicts("outbox_chosen", routed=False, **_filter(states=states, **which))
        return [row["event_id"] for row in rows]

    def kill(self, ids: Sequence[UUID], *, dry_run: bool = False, reason: str | None = None) -> list[UUID]:
        """Makes events DEAD at once, even if a relay has claimed them. Returns those that were open."""
        rows = self._db.call("outbox_kill", ids=list(ids), reason=reason, dry_run=dry_run)
        return [event_id for (event_id,) in rows]

    def prune(
        self,
        older_than: Duration,
        *,
        states: Sequence[EventState | str] = (EventState.PUBLISHED,),
        dry_run: bool = False,
        reason: str | None = None,
    ) -> int:
        """Removes events that were published (or, with `states`, died) longer ago. Returns how many."""
        rows = self._db.call(
            "outbox_prune",
            before=self._before(older_than),
            states=[str(state) for state in states],
            dry_run=dry_run,
            reason=reason,
        )
        return int(rows[0][0])

    def forget(self, older_than: Duration, *, dry_run: bool = False, reason: str | None = None) -> int:
        """Removes old records of events that came from other databases. Returns how many."""
        rows = self._db.call(
            "outbox_forget",
            before=self._before(older_than),
            dry_run=dry_run,
            reason=reason,
        )
        return int(rows[0][0])

    def _before(self, older_than: Duration) -> datetime:
        clock = self._db.clock
        now: datetime = clock() if clock is not None else self._db.call("outbox_clock")[0][0]
        return now - timedelta(seconds=seconds(older_than))

    def stats(self, window: Duration = "1m") -> list[Figures]:
        """Backlog, age, rate and failures of each destination."""
        rows = self._db.call_dicts("outbox_stats", window=timedelta(seconds=seconds(window)))
        return [Figures(**row) for row in rows]

    def audit(self, *, limit: int = 1000) -> list[dict[str, Any]]:
        """Actions of operators, newest first."""
        return self._db.call_dicts("outbox_records", limit=limit)

    def verify(self) -> list[Finding]:
        """Checks the outbox with events of its own, in a transaction that is rolled back."""
        with self._db.connection() as connection:
            return findings(connection)


def _filter(
    *,
    states: Sequence[EventState | str] | None = None,
    ids: Sequence[UUID] | None = None,
    since: datetime | None = None,
    until: datetime | None = None,
    event_type: str | None = None,
    destination: str | None = None,
    ordering_key: str | None = None,
    error: str | None = None,
) -> dict[str, Any]:
    return {
        "states": None if states is None else [str(state) for state in states],
        "from": since,
        "until": until,
        "type": event_type,
        "destination": destination,
        "ordering_key": ordering_key,
        "error": error,
        "ids": None if ids is None else list(ids),
    }
