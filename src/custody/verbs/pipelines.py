"""The verbs of a pipeline: start, claim, keep, commit, release. Each is fenced by its driver's epoch.

A claim is numbered, and its number is what makes a commit happen once. What the tasks of a claim do is in `tasks`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Literal, NamedTuple

from custody.model.outcomes import Outcome
from custody.model.placement import Layout
from custody.model.policy import seconds_or_none
from custody.store.postgres import Database
from custody.verbs.settle import offset_set, storable

Ranges = tuple[tuple[int, int], ...]
"""A set of offsets: (first, after the last) of each stretch."""


@dataclass(frozen=True, kw_only=True)
class Driver:
    """Who drives a pipeline: every verb checks that its epoch is still the newest."""

    topic: str
    group: str
    group_id: int
    epoch: int
    name: str
    visibility: float | None = None
    uid: str | None = None
    """Of the pipeline: no other one has it, in whatever database. Only its driver needs it."""


@dataclass(frozen=True, kw_only=True)
class Pass:
    """Where a pass over what is there now ends: the end of each partition, and the time up to which retries are due."""

    until: tuple[int, ...]
    due: datetime | None


class Claim(NamedTuple):
    """What a claim took. Without a number: why it took nothing, and when there may be something (seconds)."""

    number: int | None
    messages: int
    reason: str | None
    due_in: float | None


class Overdue(NamedTuple):
    """A message whose handler has been running for so many seconds; `stopped`: its process was killed for it."""

    partition: int
    offset: int
    seconds: float
    stopped: bool


class Part(NamedTuple):
    """What a claim took of one partition."""

    partition: int
    ranges: Ranges
    messages: int


class Sink(NamedTuple):
    """A topic to publish to: its id, and how messages are placed in it."""

    topic_id: int
    partitions: int
    priorities: bool = False

    @property
    def layout(self) -> Layout:
        return Layout(self.partitions, self.priorities)


class Placed(NamedTuple):
    """So many messages were staged by an attempt for a partition of a topic, which then had so many partitions."""

    attempt: int
    topic_id: int
    partition: int
    messages: int
    of: int


@dataclass(kw_only=True)
class Work:
    """What the tasks of a batch report: what did not go well, what was not run, and what is staged.

    `exact`: the staged messages are just those of the `ran` messages that went well, each task's in order. `kept`: how
    many rows each attempt has kept for sinks outside of the database. `causes`: what was raised for
    failed messages, and where, so far as the code did not decide itself that they fail.
    """

    failed: dict[tuple[int, int], Outcome] = field(default_factory=dict)
    left: dict[int, list[int]] = field(default_factory=dict)
    placed: list[Placed] = field(default_factory=list)
    kept: dict[int, int] = field(default_factory=dict)
    causes: dict[tuple[int, int], str] = field(default_factory=dict)
    exact: bool = True
    ran: int = 0


class Due(NamedTuple):
    """What a claim took of a partition, and what of it will be done."""

    partition: int
    ranges: Ranges
    done: Ranges


class Begun(NamedTuple):
    """Something that was begun outside of the database and is not over: to be shown if committed, else cleared away."""

    claim: int
    epoch: int
    token: str
    sinks: list[str]
    committed: bool


@dataclass(frozen=True)
class Committed:
    """What a commit did. `dead` are among the failed. `lost`: their lease was gone, nothing of theirs was published.
    `repeated`: it had been committed before."""

    repeated: bool
    messages: int
    done: int
    failed: int
    dead: int
    later: int
    released: int
    lost: int
    outputs: int


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Where a pipeline's group stands, and what its last batch came to. Where the group is `bound`, lag includes what
    it has not looked at yet, bound to it or not."""

    lag: int
    bound: bool
    waiting: int
    in_flight: int
    parked: int
    dead: int
    blocked_keys: int
    last_claim: int | None
    last: Committed | None


State = Literal["running", "retrying", "stopped", "failed", "gone"]
"""Of a pipeline. `retrying`: it failed and is tried again; `gone`: its driver ran and is not heard of any more."""


@dataclass(frozen=True, kw_only=True)
class PipelineState:
    """What a pipeline is at: its state and since when, its failures in a row, the last error, and who drives it.

    `seen_at`: when its driver was last known to be alive. `claim`, `claimed_at` and `messages`: the claim in flight.
    """

    topic: str
    group: str
    state: State
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


class Drive:
    """The verbs of one driver. Runs in the driver's process, and in the process of its source."""

    def __init__(self, db: Database, driver: Driver, clock: Callable[[], datetime] | None = None) -> None:
        self._db = db
        self._clock = clock
        self.driver = driver
        self._named: dict[str, Any] = {"topic": driver.topic, "group": driver.group, "epoch": driver.epoch}
        self._visibility = None if driver.visibility is None else timedelta(seconds=driver.visibility)

    def _now(self) -> datetime | None:
        return None if self._clock is None else self._clock()

    def claim(self, max_messages: int, only: Pass | None = None) -> Claim:
        """The claim in flight, its leases renewed, or a new one over every partition that has something to give."""
        row = self._db.call(
            "claim_batch",
            **self._named,
            max=max_messages,
            visibility=self._visibility,
            worker=self.driver.name,
            until=None if only is None else list(only.until),
            due=None if only is None else only.due,
            now=self._now(),
        )[0]
        return Claim(*row)

    def keep(self) -> int:
        """Renews the leases of the claim in flight; how many messages they still hold."""
        return int(self._db.call("keep_claim", **self._named, visibility=self._visibility, now=self._now())[0][0])

    def report(self, state: State | None = None, *, tries: int | None = None, error: str | None = None) -> None:
        """The driver is alive, and this is how its pipeline fares; what is left out stays as it is."""
        self._db.call(
            "report_pipeline", **self._named, state=state, tries=tries, error=storable(error), now=self._now()
        )

    def release(self) -> bool:
        """Gives back a claim that was not run. False if there is none."""
        return bool(self._db.call("release_claim", **self._named, worker=self.driver.name, now=self._now())[0][0])

    def claimed(self, number: int) -> list[Part]:
        """What a claim took of each partition; nothing if it is not in flight."""
        rows = self._db.call("claimed", group_id=self.driver.group_id, claim=number)
        return [Part(partition, ranges_of(ranges), messages) for partition, ranges, messages in rows]

    def overdue(self) -> list[Overdue]:
        """Messages of the claim in flight whose handler has been running for long, the longest first."""
        rows = self._db.call("overdue", group_id=self.driver.group_id, now=self._now())
        return [Overdue(*row) for row in rows]

    def by_key(self, number: int) -> list[tuple[int, int]]:
        """The (partition, offset) of a claim's messages, those of a key beside one another and in order."""
        rows = self._db.call("claim_by_key", group_id=self.driver.group_id, claim=number)
        return [(partition, offset) for partition, offset in rows]

    def commit(
        self,
        number: int,
        work: Work,
        *,
        done: int | None = None,
        query_id: str | None = None,
        batch_id: int | None = None,
    ) -> Committed:
        """One transaction: settles the claim's messages and publishes what those that went well put out.

        A repeat after an unknown outcome changes nothing and returns what the first one did. `done`: so many have to
        be done in the end, since the results of just those were written outside.
        """
        row = self._db.call(
            "commit_claim",
            **self._named,
            claim=number,
            **_outcomes(work),
            done=done,
            placed_attempts=[placed.attempt for placed in work.placed],
            placed_topics=[placed.topic_id for placed in work.placed],
            placed_partitions=[placed.partition for placed in work.placed],
            placed_counts=[placed.messages for placed in work.placed],
            placed_of=[placed.of for placed in work.placed],
            exact=work.exact,
            ran=work.ran,
            worker=self.driver.name,
            query=query_id,
            batch=batch_id,
            now=self._now(),
        )[0]
        return Committed(**dict(zip(Committed.__dataclass_fields__, row, strict=True)))

    def begin_write(self, number: int, work: Work, token: str, sinks: Sequence[str]) -> list[Due]:
        """Before results are written outside: what of the claim will be done. Those are to be written, and no other.

        The token names this writing of them: it is the one that counts if the claim is committed next.
        """
        rows = self._db.call(
            "begin_write",
            **self._named,
            claim=number,
            **_outcomes(work),
            token=token,
            sinks=list(sinks),
            now=self._now(),
        )
        return [Due(partition, ranges_of(held), ranges_of(done)) for partition, held, done in rows]

    def open_writes(self) -> list[Begun]:
        """What earlier claims have begun outside and nobody has finished."""
        return [Begun(*row) for row in self._db.call("open_writes", **self._named)]

    def end_write(self, number: int) -> None:
        """Nothing is left to do outside for this claim."""
        self._db.call("end_write", **self._named, claim=number)

    def sink(self, topic: str) -> Sink:
        """A topic to publish to."""
        return Sink(*self._db.call("layout", topic=topic)[0])

    def drop_stage(self, number: int) -> None:
        """Clears the stage of a claim away, unless somebody still writes into it: then it goes another day."""
        self._db.call("drop_stage", stage=stage_of(self.driver.group_id, number))


def start(
    db: Database,
    topic: str,
    group: str,
    *,
    driver: str,
    visibility: float | None,
    after: int | None,
    clock: Callable[[], datetime] | None,
) -> tuple[Drive, Pass]:
    """Takes over the pipeline with a new epoch, and the claim that the driver before had in flight."""
    group_id, epoch, uid, _, until, due = db.call(
        "start_pipeline",
        topic=topic,
        group=group,
        driver=driver,
        visibility=None if visibility is None else timedelta(seconds=visibility),
        after=after,
        now=None if clock is None else clock(),
    )[0]
    taken = Driver(
        topic=topic, group=group, group_id=group_id, epoch=epoch, name=driver, visibility=visibility, uid=str(uid)
    )
    return Drive(db, taken, clock), Pass(until=tuple(until), due=due)


def states(db: Database, topic: str | None, group: str | None, *, now: datetime | None) -> list[PipelineState]:
    """What the pipelines are at: all, those of a topic, or one."""
    rows = db.call_dicts("pipeline_states", topic=topic, group=group, now=now)
    return [PipelineState(group=row.pop("consumer_group"), **row) for row in rows]


def figures(db: Database, topic: str, group: str, *, now: datetime | None) -> Figures:
    """Where the group stands, and what the last batch came to."""
    row = db.call_dicts("pipeline_figures", topic=topic, group=group, now=now)[0]
    last = [
        row.pop(name)
        for name in ("claim", "messages", "done", "failed", "died", "later", "released", "lost", "outputs")
    ]
    return Figures(**row, last_claim=last[0], last=None if last[0] is None else Committed(False, *last[1:]))


def stage_of(group_id: int, number: int) -> str:
    """The table that a claim's tasks write to."""
    return f"staged_{group_id}_{number}"


def _outcomes(work: Work) -> dict[str, Any]:
    """What did not go well, and what was not run, as arguments."""
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


def ranges_of(multirange: Iterable[Any]) -> Ranges:
    """A multirange of PostgreSQL."""
    return tuple((part.lower, part.upper) for part in multirange)
