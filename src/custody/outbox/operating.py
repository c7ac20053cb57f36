"""Verbs for operators of an outbox, in a database with all of Custody or with the outbox alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from types import TracebackType
from typing import Annotated, Any, Self, TypedDict, Unpack
from uuid import UUID

from custody.errors import EventNotFound
from custody.model.policy import Duration, seconds
from custody.outbox.conformance import Finding, findings
from custody.outbox.events import Event, EventState, Figures, event_of
from custody.store import standalone_outbox
from custody.store.postgres import Connection, Database
from custody.wire.fields import DryRun, GivenTimeout, Help, Page, Positive, Reason


class EventFilter(TypedDict, total=False):
    """Selects events: those that meet every given condition."""

    ids: Annotated[Sequence[UUID] | None, Help("Ids of events. Default: those that match the filters.")]
    since: Annotated[datetime | None, Help("Only events that changed at this time or later.")]
    until: Annotated[datetime | None, Help("Only events that changed before this time.")]
    event_type: Annotated[str | None, Help("Only events of this type.")]
    destination: Annotated[str | None, Help("Only events for this destination.")]
    ordering_key: Annotated[str | None, Help("Only events of this ordering key.")]
    error: Annotated[str | None, Help("Only errors that match, such as 'timeout%'.", "LIKE")]


States = Annotated[Sequence[EventState | str], Help("PENDING, CLAIMED, PUBLISHED or DEAD.")]
Ids = Annotated[Sequence[UUID], Help("Ids of events.")]
Age = Annotated[GivenTimeout, Help("Only events older than this.")]


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

    def events(
        self, *, states: States | None = None, limit: Page | None = 100, **which: Unpack[EventFilter]
    ) -> list[Event]:
        """The events that match the filters, oldest first."""
        rows = self._db.call_dicts("outbox_chosen", limit=limit, **_filter(states=states, **which))
        return [event_of(row) for row in rows]

    def event(self, event_id: Annotated[UUID, Help("The event.")]) -> Event:
        """One event with its payload and headers.

        Refused (`event_not_found`) if there is none.
        """
        found = self.events(ids=[event_id])
        if not found:
            raise EventNotFound(
                f"the outbox has no event {event_id}", "It may have been pruned; see the list of events."
            )
        return found[0]

    def replay(
        self,
        *,
        states: States = (EventState.DEAD,),
        limit: Annotated[Positive | None, Help("At most this many.")] = None,
        dry_run: DryRun = False,
        reason: Reason = None,
        **which: Unpack[EventFilter],
    ) -> list[UUID]:
        """Publishes events again that are DEAD (or, with `states`, PUBLISHED), in order for each key.

        Their attempts are reset. Returns the ids. With `dry_run` nothing changes. Events of a deleted topic are left
        out: see `stranded`.
        """
        rows = self._db.call(
            "outbox_replay",
            limit=limit,
            dry_run=dry_run,
            reason=reason,
            **_filter(states=states, **which),
        )
        return [event_id for (event_id,) in rows]

    def stranded(self, *, states: States = (EventState.DEAD,), **which: Unpack[EventFilter]) -> list[UUID]:
        """The events that a replay with this filter leaves out, because their topics are deleted."""
        rows = self._db.call_dicts("outbox_chosen", routed=False, **_filter(states=states, **which))
        return [row["event_id"] for row in rows]

    def kill(self, ids: Ids, *, dry_run: DryRun = False, reason: Reason = None) -> list[UUID]:
        """Makes events DEAD that are not published yet, even if a relay has claimed them.

        Returns those that were open.
        """
        rows = self._db.call("outbox_kill", ids=list(ids), reason=reason, dry_run=dry_run)
        return [event_id for (event_id,) in rows]

    def prune(
        self,
        older_than: Age,
        *,
        states: States = (EventState.PUBLISHED,),
        dry_run: DryRun = False,
        reason: Reason = None,
    ) -> int:
        """Removes events that have been PUBLISHED (or, with `states`, DEAD) for longer than this.

        Returns how many.
        """
        rows = self._db.call(
            "outbox_prune",
            before=self._before(older_than),
            states=[str(state) for state in states],
            dry_run=dry_run,
            reason=reason,
        )
        return int(rows[0][0])

    def forget(self, older_than: Duration, *, dry_run: bool = False, reason: Reason = None) -> int:
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

    def stats(self, window: Annotated[GivenTimeout, Help("Time that counts as recent.")] = "1m") -> list[Figures]:
        """Backlog, age, rate and failures of each destination."""
        rows = self._db.call_dicts("outbox_stats", window=timedelta(seconds=seconds(window)))
        return [Figures(**row) for row in rows]

    def audit(self, *, limit: Page = 1000) -> list[dict[str, Any]]:
        """What operators did to the outbox, newest first: replays, kills and prunes."""
        return self._db.call_dicts("outbox_records", limit=limit)

    def verify(self) -> list[Finding]:
        """Checks that the outbox conforms, with events of its own in a transaction that is rolled back."""
        with self._db.connection() as connection:
            return findings(connection)


def _filter(*, states: Sequence[str] | None, **which: Unpack[EventFilter]) -> dict[str, Any]:
    """The conditions as arguments of an SQL function."""
    if wrong := which.keys() - EventFilter.__annotations__.keys():
        raise TypeError(f"there is no filter {', '.join(sorted(wrong))}")
    ids = which.get("ids")
    return {
        "states": None if states is None else [str(state) for state in states],
        "from": which.get("since"),
        "until": which.get("until"),
        "type": which.get("event_type"),
        "destination": which.get("destination"),
        "ordering_key": which.get("ordering_key"),
        "error": which.get("error"),
        "ids": None if ids is None else list(ids),
    }
