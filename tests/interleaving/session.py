"""One database session of a test: a transaction that stays open, and calls that may have to wait in a thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, TypeVar
from uuid import UUID

import psycopg
from psycopg import sql
from tests.waiting import wait_for

TOPIC = "orders"
GROUP = "stock"
T = TypeVar("T")


@dataclass(frozen=True)
class Claimed:
    """What a claim answered: the offsets with their attempts, or the reason why there is no lease."""

    lease_id: UUID | None
    partition: int | None
    reason: str | None
    attempts: dict[int, int]

    @property
    def offsets(self) -> list[int]:
        return list(self.attempts)


@dataclass(frozen=True)
class Outcome:
    settled: int
    lost: list[int]
    dead: list[int]
    released: list[int]
    already: list[int]


class Session:
    """Verbs on one connection. A transaction begins with the first call and ends with `commit` or `rollback`."""

    def __init__(self, url: str, clock: Callable[[], datetime], *, name: str) -> None:
        self._clock = clock
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self.name = name
        self.connection: psycopg.Connection[Any] = psycopg.connect(url, application_name=name)
        self._watch: psycopg.Connection[Any] = psycopg.connect(url, autocommit=True)

    def close(self) -> None:
        self.connection.cancel_safe(timeout=5) if self.waits() else None
        self._thread.shutdown(wait=True)
        self.connection.close()
        self._watch.close()

    def commit(self) -> None:
        self.connection.commit()

    def rollback(self) -> None:
        self.connection.rollback()

    def isolation(self, level: psycopg.IsolationLevel) -> None:
        self.connection.isolation_level = level

    # waiting

    def waits(self) -> bool:
        """Whether this session waits for a lock of another one."""
        row = self._watch.execute(
            "SELECT cardinality(pg_blocking_pids(%s)) > 0", (self.connection.info.backend_pid,)
        ).fetchone()
        return bool(row and row[0])

    def waits_for(self, other: Session) -> bool:
        row = self._watch.execute(
            "SELECT %s = ANY (pg_blocking_pids(%s))",
            (other.connection.info.backend_pid, self.connection.info.backend_pid),
        ).fetchone()
        return bool(row and row[0])

    def start(self, verb: Callable[..., T], *arguments: Any, **named: Any) -> Future[T]:
        """Runs a verb of this session in its thread."""
        return self._thread.submit(verb, *arguments, **named)

    def blocked(self, verb: Callable[..., T], *arguments: Any, **named: Any) -> Future[T]:
        """Runs a verb of this session in its thread, and returns when it waits for a lock."""
        running = self.start(verb, *arguments, **named)
        wait_for(lambda: running.done() or self.waits(), f"{self.name} neither waits for a lock nor returns")
        assert not running.done(), f"{self.name} did not wait: {running.exception() or running.result()}"
        return running

    # verbs

    def call(self, function: str, **arguments: Any) -> list[tuple[Any, ...]]:
        query = sql.SQL("SELECT * FROM custody.{}({})").format(
            sql.Identifier(function),
            sql.SQL(", ").join(sql.SQL("{} => %s").format(sql.Identifier(f"p_{argument}")) for argument in arguments),
        )
        return self.connection.execute(query, list(arguments.values())).fetchall()

    def claim(
        self, most: int = 1, *, partition: int | None = None, visibility: float = 30, group: str = GROUP
    ) -> Claimed:
        rows = self.call(
            "claim",
            topic=TOPIC,
            group=group,
            max=most,
            visibility=timedelta(seconds=visibility),
            worker=self.name,
            partition=partition,
            now=self._clock(),
        )
        lease = rows[0][0]
        return Claimed(
            UUID(lease["lease_id"]) if "lease_id" in lease else None,
            lease.get("partition"),
            lease.get("reason"),
            {row[1]: row[7] for row in rows[1:]},
        )

    def settle(
        self, lease_id: UUID | None, outcomes: Mapping[int, str], *, delay: float | None = None, exact: bool = False
    ) -> Outcome:
        row = self.call(
            "settle",
            lease_id=lease_id,
            offsets=list(outcomes),
            outcomes=list(outcomes.values()),
            errors=["boom" if outcome != "ack" else None for outcome in outcomes.values()],
            delays=None if delay is None else [delay] * len(outcomes),
            worker=self.name,
            now=self._clock(),
            exact=exact,
        )[0]
        return Outcome(*row)

    def ack(self, lease_id: UUID | None, *offsets: int) -> Outcome:
        return self.settle(lease_id, dict.fromkeys(offsets, "ack"))

    def nack(self, lease_id: UUID | None, *offsets: int, delay: float | None = None) -> Outcome:
        return self.settle(lease_id, dict.fromkeys(offsets, "nack"), delay=delay)

    def ack_lease(self, lease_id: UUID | None, *, exact: bool = False, by_its_clock: bool = False) -> Outcome:
        """`by_its_clock`: what the time is, is for the database to say."""
        now = None if by_its_clock else self._clock()
        return Outcome(*self.call("ack_lease", lease_id=lease_id, worker=self.name, now=now, exact=exact)[0])

    def settle_lease(self, lease_id: UUID | None, outcome: str) -> Outcome:
        row = self.call("settle_lease", lease_id=lease_id, outcome=outcome, worker=self.name, now=self._clock())[0]
        return Outcome(*row)

    def extend(self, lease_id: UUID | None, timeout: float, *, offset: int | None = None) -> datetime | None:
        row = self.call(
            "extend", lease_id=lease_id, timeout=timedelta(seconds=timeout), offset=offset, now=self._clock()
        )[0]
        deadline: datetime | None = row[0]
        return deadline

    def publish(self, keys: Sequence[str | None], *, partitions: Sequence[int] | None = None) -> list[tuple[int, int]]:
        """One message for each key; returns (partition, offset) of each."""
        rows = self.call(
            "publish",
            topic=TOPIC,
            partitions=list(partitions or [0] * len(keys)),
            keys=list(keys),
            kinds=["j"] * len(keys),
            payloads=[b"1"] * len(keys),
            headers=[None] * len(keys),
            allow_split=True,
            now=self._clock(),
        )
        return [(partition, offset) for partition, offset, _ in rows]

    def redrive(self) -> list[tuple[Any, ...]]:
        return self.call("redrive", topic=TOPIC, group=GROUP, actor=self.name, now=self._clock())

    def rewind(self, to_offset: int, *, partition: int | None = None, wait: float = 30) -> list[tuple[Any, ...]]:
        return self.call(
            "rewind",
            topic=TOPIC,
            group=GROUP,
            to_offset=to_offset,
            partition=partition,
            actor=self.name,
            now=self._clock(),
            wait=timedelta(seconds=wait),
        )

    def skip(self, offset: int, *, partition: int = 0) -> None:
        self.call("skip", topic=TOPIC, group=GROUP, partition=partition, offset=offset, now=self._clock())

    def release_key(self, key: str) -> int:
        return int(self.call("release_key", topic=TOPIC, group=GROUP, key=key, now=self._clock())[0][0])

    def seal(self) -> int:
        return int(self.call("seal_segment", topic=TOPIC, now=self._clock())[0][0])

    def drop(self) -> list[tuple[Any, ...]]:
        """(segment, dropped, kept events, held by) of each segment that was looked at."""
        return self.call("drop_segments", topic=TOPIC)
