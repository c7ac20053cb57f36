"""Conformance checks of an outbox, for a live installation. Each works on events of its own, and is rolled back.

The checks run in a transaction that is rolled back, with a time one day in the past, and claim only the destination of
their own events. What needs a killed process, several processes or a running relay is proved by Custody's own tests in
tests/chaos, tests/interleaving and tests/outbox.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import product
from typing import Any, Literal
from uuid import UUID, uuid4

import psycopg
from psycopg import sql

from custody.outbox.events import EventState
from custody.store.postgres import Connection, run_function

MAX_ATTEMPTS = 3
LEASE = timedelta(seconds=30)
FIELDS = (
    "event_id", "event_type", "payload", "created_at", "headers", "partition_key", "ordering_key",
    "status", "attempts", "available_at", "claimed_at", "claimed_by", "published_at", "updated_at", "last_error",
)  # fmt: skip
IMMUTABLE = {
    "event_id": "gen_random_uuid()", "event_type": "'other'", "payload": "'other'", "created_at": "now()",
    "headers": "'{\"other\": \"1\"}'", "partition_key": "'other'", "ordering_key": "'other'", "destination": "'other:'",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of one check; `error` says what was wrong."""

    id: str
    level: Literal["MUST", "SHOULD"]
    text: str
    passed: bool
    error: str | None = None


class Trial:
    """An outbox under test: its verbs, with a clock that the check moves."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.destination = f"verify-{uuid4()}:"
        self.now: datetime = connection.execute("SELECT clock_timestamp() - interval '1 day'").fetchall()[0][0]

    def write(self, **given: Any) -> UUID:
        arguments: dict[str, Any] = {
            "event_type": "verified",
            "kind": "j",
            "payload": b"{}",
            "destination": self.destination,
        }
        arguments |= {"now": self.now, **given}
        return UUID(str(run_function(self.connection, "outbox_add", arguments)[0][0]))

    def claim(self, most: int = 100, *, relay: str = "verify", **given: Any) -> dict[UUID, tuple[int, str]]:
        """event_id → (id, the claim), in order."""
        first = self.connection.execute(
            "SELECT coalesce(min(id), 1) - 1 FROM custody.outbox WHERE destination = %s", [self.destination]
        ).fetchone()
        arguments: dict[str, Any] = {
            "relay": relay,
            "max": most,
            "lease": LEASE,
            "max_attempts": MAX_ATTEMPTS,
            "now": self.now,
        }
        arguments |= {"only": [self.destination], "after": (first or (0,))[0], **given}
        rows = run_function(self.connection, "outbox_claim", arguments)[1:]
        return {row[1]: (row[0], row[12]) for row in sorted(rows)}

    def settle(self, claimed: tuple[int, str], outcome: str, error: str | None = None, **given: Any) -> list[str]:
        arguments: dict[str, Any] = {
            "claim": claimed[1],
            "ids": [claimed[0]],
            "outcomes": [outcome],
            "errors": [error],
            "delays": [60.0],
        }
        arguments |= {"max_attempts": MAX_ATTEMPTS, "now": self.now, **given}
        return [row[1] for row in run_function(self.connection, "outbox_settle", arguments)]

    def call(self, function: str, **arguments: Any) -> list[tuple[Any, ...]]:
        return run_function(self.connection, function, arguments)

    def row(self, event_id: UUID, *columns: str) -> tuple[Any, ...]:
        names = sql.SQL(", ").join(map(sql.Identifier, columns))
        found = self.connection.execute(
            sql.SQL("SELECT {} FROM custody.outbox WHERE event_id = %s").format(names), [event_id]
        ).fetchone()
        assert found is not None, f"event {event_id} is gone"
        return tuple(found)

    def state(self, event_id: UUID) -> str:
        return str(self.row(event_id, "status")[0])

    def move(self, seconds: float) -> datetime:
        self.now += timedelta(seconds=seconds)
        return self.now

    def at_present(self) -> None:
        """Sets the clock to the time of the transaction."""
        self.now = self.connection.execute("SELECT now()").fetchall()[0][0]

    def refused(self, statement: str, *values: Any) -> bool:
        """Whether the table refuses a statement that uses the server's clock."""
        try:
            with self.connection.transaction():
                self.connection.execute("SELECT set_config('custody.given_time', '', true)")
                changed = self.connection.execute(statement.encode(), values).rowcount
        except psycopg.Error:
            return True
        assert changed == 1, f"{changed} rows were changed"
        return False

    def in_state(self, state: EventState) -> UUID:
        """A new event, brought to that state by the verbs."""
        event_id = self.write()
        if state is not EventState.PENDING:
            claimed = self.claim(after=self.row(event_id, "id")[0] - 1)[event_id]
            if state is not EventState.CLAIMED:
                self.settle(claimed, {EventState.PUBLISHED: "published", EventState.DEAD: "dead"}[state], "an error")
        assert self.state(event_id) == state
        return event_id


Check = Callable[[Trial], None]
CHECKS: list[tuple[str, Literal["MUST", "SHOULD"], str, Check]] = []


def must(number: str, text: str, level: Literal["MUST", "SHOULD"] = "MUST") -> Callable[[Check], Check]:
    def register(check: Check) -> Check:
        CHECKS.append((number, level, text, check))
        return check

    return register


class _RollBack(Exception):
    pass


def findings(connection: Connection) -> list[Finding]:
    """Runs every check, each in a transaction or savepoint that is rolled back."""
    from custody.outbox import event_checks, operating_checks  # noqa: F401  # they register themselves

    found = []
    for number, level, text, check in CHECKS:
        error: str | None = None
        try:
            with connection.transaction():
                check(Trial(connection))
                raise _RollBack
        except _RollBack:
            pass
        except (AssertionError, psycopg.Error, KeyError, ValueError) as raised:
            error = f"{type(raised).__name__}: {raised}".strip()
        found.append(Finding(id=number, level=level, text=text, passed=error is None, error=error))
    return found


def moves() -> Iterator[tuple[EventState, EventState]]:
    """Every pair of different states."""
    return ((a, b) for a, b in product(EventState, EventState) if a is not b)
