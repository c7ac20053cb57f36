"""The verbs of a pipeline: start, claim, keep, commit, release. Each is fenced by its driver's epoch.

A claim has a number, by which a repeated commit is recognised. The verbs of tasks are in `spark/database/tasks.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Literal, NamedTuple

import msgspec

from custody.model.outcomes import Counts, Outcome
from custody.model.placement import Layout
from custody.model.policy import seconds_or_none
from custody.store.postgres import Database
from custody.verbs.settle import offset_set, storable

Ranges = tuple[tuple[int, int], ...]
"""A set of offsets, as (first, last + 1) of each contiguous range."""


@dataclass(frozen=True, kw_only=True)
class Driver:
    """The identity of a driver. Every verb checks that its epoch is still the newest."""

    topic: str
    group: str
    group_id: int
    epoch: int
    name: str
    visibility: float | None = None
    uid: str | None = None
    """The unique id of the pipeline across databases. Only its driver needs it."""


@dataclass(frozen=True, kw_only=True)
class PassLimit:
    """The limits of one pass: the end of each partition, and the time up to which retries are due."""

    until: tuple[int, ...]
    due: datetime | None


class Claim(NamedTuple):
    """A claim. Without a number it took nothing: `reason` says why, `due_in` when to try again (seconds)."""

    number: int | None
    messages: int
    reason: str | None
    due_in: float | None


class Overdue(NamedTuple):
    """A message whose handler runs for long; `stopped`: its process was killed for that."""

    partition: int
    offset: int
    seconds: float
    stopped: bool


class Part(NamedTuple):
    """The messages of a claim in one partition."""

    partition: int
    ranges: Ranges
    messages: int


class Sink(NamedTuple):
    """A topic to publish to: its id and layout."""

    topic_id: int
    partitions: int
    priorities: bool = False

    @property
    def layout(self) -> Layout:
        return Layout(self.partitions, self.priorities)


class StagedCount(NamedTuple):
    """The number of messages that a task attempt staged for a partition of a topic; `of`: the topic's number of
    partitions at that time."""

    attempt: int
    topic_id: int
    partition: int
    messages: int
    of: int


class StagedStates(NamedTuple):
    """The number of states of keys that a task attempt of a keyed pipeline staged; `changes`: how often an operator had
    removed states when it read them; `ttl`: for how many seconds they are kept."""

    attempt: int
    states: int
    changes: int
    ttl: float | None


@dataclass(kw_only=True)
class BatchReport:
    """The report of the tasks of a batch: `failed` messages, messages `left` without a run, and staged messages.

    `exact`: exactly the outputs of the `ran` messages that succeeded are staged, each task's in order. `kept`: how many
    rows each attempt has kept for sinks outside of the database. `causes`: the exception of a failed message and its
    place, unless the handler itself decided on the failure. `unmet`: how many messages do not meet an expectation.
    `states`: what the attempts of a keyed pipeline staged.
    """

    failed: dict[tuple[int, int], Outcome] = field(default_factory=dict)
    left: dict[int, list[int]] = field(default_factory=dict)
    placed: list[StagedCount] = field(default_factory=list)
    kept: dict[int, int] = field(default_factory=dict)
    causes: dict[tuple[int, int], str] = field(default_factory=dict)
    unmet: Counter[str] = field(default_factory=Counter)
    states: list[StagedStates] = field(default_factory=list)
    exact: bool = True
    ran: int = 0


class PartToWrite(NamedTuple):
    """The messages of a claim in a partition, and which of them will be done."""

    partition: int
    ranges: Ranges
    done: Ranges


class OpenWrite(NamedTuple):
    """An unfinished write outside of the database: to be made visible if its claim is committed, else removed."""

    claim: int
    epoch: int
    token: str
    sinks: list[str]
    committed: bool


@dataclass(frozen=True, kw_only=True)
class Committed(Counts):
    """The result of a commit. `dead` messages are among the failed. `lost`: messages whose lease was gone, so that
    their outputs were not published. `repeated`: the claim had been committed before."""

    repeated: bool = False
    messages: int = 0
    outputs: int = 0


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Figures of a pipeline's group, and the result of its last batch. If the group has bindings (`bound`), lag
    includes messages that it has not scanned yet, whether they match or not."""

    lag: int
    bound: bool
    waiting: int
    in_flight: int
    parked: int
    dead: int
    blocked_keys: int
    last_claim: int | None
    last: Committed | None


RunState = Literal["running", "retrying", "stopped", "failed", "gone"]
"""The state of a pipeline. `retrying`: it failed and is retried; `gone`: its driver gives no sign of life."""


@dataclass(frozen=True, kw_only=True)
class PipelineState:
    """The state of a pipeline and since when, its consecutive failures, the last error, and its driver.

    `seen_at`: the last sign of life of the driver. `claim`, `claimed_at` and `messages`: the claim in flight.
    """

    topic: str
    group: str
    state: RunState
    since: datetime
    for_seconds: float
    tries: int
    last_error: str | None
    error_at: datetime | None
    seen_at: datetime
    seen_seconds: float
    driver: str
    epoch: int
    started_at: datetime
    claim: int | None
    claimed_at: datetime | None
    messages: int | None


class DriverVerbs:
    """The verbs of one driver. Runs in the driver's process, and in the process of its source."""

    def __init__(self, db: Database, driver: Driver) -> None:
        self._db = db.acting(driver.name, db.clock)
        self.driver = driver
        self._named: dict[str, Any] = {"topic": driver.topic, "group": driver.group, "epoch": driver.epoch}
        self._visibility = None if driver.visibility is None else timedelta(seconds=driver.visibility)

    def claim(self, max_messages: int, only: PassLimit | None = None) -> Claim:
        """The claim in flight, with renewed leases, or a new one over all partitions that have messages."""
        row = self._db.call(
            "claim_batch",
            **self._named,
            max=max_messages,
            visibility=self._visibility,
            until=None if only is None else list(only.until),
            due=None if only is None else only.due,
        )[0]
        return Claim(*row)

    def keep(self) -> int:
        """Renews the leases of the claim in flight. Returns how many messages they still hold."""
        return int(self._db.call("keep_claim", **self._named, visibility=self._visibility)[0][0])

    def report(self, state: RunState | None = None, *, tries: int | None = None, error: str | None = None) -> None:
        """Reports that the driver is alive, and the state of its pipeline. Omitted values stay unchanged."""
        self._db.call("report_pipeline", **self._named, state=state, tries=tries, error=storable(error))

    def release(self) -> bool:
        """Gives back a claim that was not run. False if there is none."""
        return bool(self._db.call("release_claim", **self._named)[0][0])

    def in_flight(self) -> int | None:
        """The number of the claim in flight, whoever drives it; None if there is none."""
        number: int | None = self._db.call("claim_in_flight", group_id=self.driver.group_id)[0][0]
        return number

    def claimed(self, number: int) -> list[Part]:
        """The messages of a claim in each partition; empty if the claim is not in flight."""
        rows = self._db.call("claimed", group_id=self.driver.group_id, claim=number)
        return [Part(partition, ranges_of(ranges), messages) for partition, ranges, messages in rows]

    def overdue(self) -> list[Overdue]:
        """Messages of the claim in flight whose handlers run for long, the longest first."""
        rows = self._db.call("overdue", group_id=self.driver.group_id)
        return [Overdue(*row) for row in rows]

    def by_key(self, number: int) -> list[tuple[int, int]]:
        """The (partition, offset) of a claim's messages, grouped by key and in order."""
        rows = self._db.call("claim_by_key", group_id=self.driver.group_id, claim=number)
        return [(partition, offset) for partition, offset in rows]

    def commit(
        self,
        number: int,
        work: BatchReport,
        *,
        done: int | None = None,
        query_id: str | None = None,
        batch_id: int | None = None,
    ) -> Committed:
        """Settles the claim's messages and publishes the outputs of those that succeeded, in one transaction.

        A repeat after an unknown outcome changes nothing and returns the first result. `done`: the number of messages
        that must be done in the end, because their results were written outside of the database.
        """
        repeated, counts = self._db.call(
            "commit_claim",
            **self._named,
            claim=number,
            **_outcomes(work),
            tracebacks=[storable(outcome.traceback) for outcome in work.failed.values()],
            done=done,
            placed_attempts=[placed.attempt for placed in work.placed],
            placed_topics=[placed.topic_id for placed in work.placed],
            placed_partitions=[placed.partition for placed in work.placed],
            placed_counts=[placed.messages for placed in work.placed],
            placed_of=[placed.of for placed in work.placed],
            exact=work.exact,
            ran=work.ran,
            states=_states(work),
            query=query_id,
            batch=batch_id,
        )[0]
        return Committed(repeated=repeated, **counts)

    def begin_write(self, number: int, work: BatchReport, token: str, sinks: Sequence[str]) -> list[PartToWrite]:
        """Called before results are written outside of the database. Returns the messages that will be done: the
        results of exactly these are to be written.

        The token identifies this write. It is the one that counts if the claim is committed next.
        """
        rows = self._db.call(
            "begin_write",
            **self._named,
            claim=number,
            **_outcomes(work),
            token=token,
            sinks=list(sinks),
        )
        return [PartToWrite(partition, ranges_of(held), ranges_of(done)) for partition, held, done in rows]

    def open_writes(self) -> list[OpenWrite]:
        """Unfinished writes of earlier claims outside of the database."""
        return [OpenWrite(*row) for row in self._db.call("open_writes", **self._named)]

    def end_write(self, number: int) -> None:
        """Records that the write of this claim is finished."""
        self._db.call("end_write", **self._named, claim=number)

    def sink(self, topic: str) -> Sink:
        """A topic to publish to."""
        return Sink(*self._db.call("layout", topic=topic)[0])

    def drop_stage(self, number: int) -> None:
        """Drops the stage table of a claim, unless a task still writes to it: then it is dropped later."""
        self._db.call("drop_stage", stage=stage_of(self.driver.group_id, number))

    def drop_states(self, number: int) -> None:
        """The same for the table with the states of keys."""
        self._db.call("drop_stage", stage=f"{stage_of(self.driver.group_id, number)}_states")

    def require_keyed(self) -> None:
        """Refuses a group whose keys can have no state."""
        self._db.call("require_keyed", topic=self.driver.topic, group=self.driver.group)


def start(
    db: Database,
    topic: str,
    group: str,
    *,
    driver: str,
    visibility: float | None,
    after: int | None,
) -> tuple[DriverVerbs, PassLimit]:
    """Takes over the pipeline with a new epoch, and the claim in flight of the previous driver."""
    group_id, epoch, uid, _, until, due = db.call(
        "start_pipeline",
        topic=topic,
        group=group,
        driver=driver,
        visibility=None if visibility is None else timedelta(seconds=visibility),
        after=after,
    )[0]
    taken = Driver(
        topic=topic, group=group, group_id=group_id, epoch=epoch, name=driver, visibility=visibility, uid=str(uid)
    )
    return DriverVerbs(db, taken), PassLimit(until=tuple(until), due=due)


def states(db: Database, topic: str | None, group: str | None) -> list[PipelineState]:
    """The states of all pipelines, of those of a topic, or of one."""
    rows = db.call_dicts("pipeline_states", topic=topic, group=group)
    return [PipelineState(group=row.pop("consumer_group"), **row) for row in rows]


def figures(db: Database, topic: str, group: str) -> Figures:
    """The figures of a group, and the result of its last batch."""
    row = db.call_dicts("pipeline_figures", topic=topic, group=group)[0]
    last = row.pop("last")
    return Figures(**row, last=None if last is None else Committed(**last))


def stage_of(group_id: int, number: int) -> str:
    """The name of the table that a claim's tasks write to."""
    return f"staged_{group_id}_{number}"


def _outcomes(work: BatchReport) -> dict[str, Any]:
    """The failed and the left messages, as arguments of an SQL function."""
    failed = work.failed.values()
    return {
        "partitions": [partition for partition, _ in work.failed],
        "offsets": [offset for _, offset in work.failed],
        "outcomes": [outcome.kind for outcome in failed],
        "errors": [storable(outcome.error) for outcome in failed],
        "delays": [seconds_or_none(outcome.delay) for outcome in failed],
        "left_partitions": list(work.left),
        "left": [offset_set(offsets) for offsets in work.left.values()],
    }


def _states(work: BatchReport) -> str | None:
    """The staged states, as JSON for an SQL function; None if the pipeline is not keyed."""
    if not work.states:
        return None
    return msgspec.json.encode(
        {
            "attempts": [staged.attempt for staged in work.states],
            "counts": [staged.states for staged in work.states],
            "changes": [staged.changes for staged in work.states],
            "ttl": work.states[0].ttl,
        }
    ).decode()


def ranges_of(multirange: Iterable[Any]) -> Ranges:
    """Converts a multirange of PostgreSQL."""
    return tuple((part.lower, part.upper) for part in multirange)
