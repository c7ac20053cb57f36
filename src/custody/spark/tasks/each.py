"""Runs a handler over messages one by one in an executor's Python process. One task reads, handles and stages.

A task runs its messages in the order of the log. A failure releases the later messages of its key in the batch. Results
are staged under a number that only this attempt has, and published only if the driver's commit names that number.
"""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from types import FrameType, GeneratorType
from typing import Any, Literal, Protocol, cast

import msgspec
import pyarrow as pa
from pyspark import TaskContext, cloudpickle

from custody.errors import CustodyError, InvalidArgument, InvalidPayload, PipelineRefused, TopicNotFound, did_you_mean
from custody.handlers import require_finished
from custody.model import codec
from custody.model.entities import Message, Outgoing
from custody.model.lanes import priority_of
from custody.model.outcomes import Outcome, outcome_of
from custody.model.placement import Layout
from custody.model.policy import seconds_or_none
from custody.spark import expectations
from custody.spark.causes import MALFORMED, WrongResult, cause_of
from custody.spark.database.states import ClaimStates
from custody.spark.database.tasks import Holding, TaskClaim
from custody.spark.tasks.events import Events, Reader
from custody.spark.tasks.job import Job, Report, rows_batch
from custody.spark.tasks.schema import decoder, plain
from custody.spark.tasks.states import KeyedHandler, States
from custody.spark.tasks.watchdog import Watchdog, margin
from custody.verbs import delays
from custody.verbs.claim import redelivery_headers
from custody.verbs.pipelines import Sink

BLOCK = 256
"""Messages that a careful attempt records at once. After a second attempt died in such a block, each is recorded."""
GIVING_UP = 10.0
"""Seconds for which a careful attempt tries to record that the database failed it."""
KILLED = "the handler ended its Python process (an exit, a crash, or out of memory)"
TOO_LONG = "the handler took longer than its handler_timeout"
HUNG = f"{TOO_LONG} and could not be interrupted: its Python process was killed"

Handler = Callable[[Message], object] | KeyedHandler
Placing = tuple[Sink | None, int, codec.Encoded, bool]
"""A topic (None: only sinks outside), its partition, the row, and whether it is delayed."""


@dataclass(frozen=True)
class To(Outgoing):
    """An output for a topic other than the first sink."""

    topic: str = field(kw_only=True)

    def __post_init__(self) -> None:
        topic: object = self.topic
        if not isinstance(topic, str) or not topic:
            raise WrongResult(
                f"To(…) needs the name of a topic, not {topic!r}, for example To(payload, topic='alerts')"
            )


def require_portable(handler: Callable[..., object]) -> None:
    """Refuses a handler that cannot be pickled for executors, before anything is claimed. Runs in the driver."""
    try:
        cloudpickle.dumps(handler)  # type: ignore[no-untyped-call]
    except Exception as error:
        raise PipelineRefused(
            f"the handler cannot be sent to executors: {type(error).__name__}: {error}",
            "Create what cannot be pickled (a lock, a connection, an open file) inside the handler, at its first call.",
        ) from error


def task(job: Job, handler: Handler) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """For `mapInArrow`: references in, the task's report out."""
    return run_task(job, partial(Attempt, job, handler))


class Attempting(Protocol):
    """One attempt of a task on its messages of a claim."""

    def take(self, events: Events) -> None: ...

    def finish(self) -> Iterator[pa.RecordBatch]: ...

    def give_up(self) -> None: ...

    def rest(self) -> None: ...


def run_task(
    job: Job, begin: Callable[[int], Attempting]
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """For `mapInArrow`: references in, the report of an attempt out, which `begin` makes for a claim."""

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        reader, attempt = Reader(job), None
        try:
            for references in batches:
                for events in reader.read(references):
                    if attempt is None:
                        attempt = begin(events.claim)
                    attempt.take(events)
            if attempt is not None:
                yield from attempt.finish()
        except CustodyError:
            if attempt is not None:
                attempt.give_up()
            raise
        finally:
            if attempt is not None:
                attempt.rest()

    return run


class Attempt:
    """One attempt of a task on its messages of a claim."""

    def __init__(self, job: Job, handler: Handler, claim: int) -> None:
        context = TaskContext.get()
        self._job, self._claim = job, claim
        self._stage = job.claim(claim).stage()
        self._states: States | None = None
        if job.state is not None:
            store = ClaimStates(job.claim(claim), self._stage.attempt, job.state.ttl)
            self._states = States(job.state, store, cast("KeyedHandler", handler))
            handler = self._states.handle
        self._handling = Handling(job, handler)
        self._report = Report()
        self._ran = 0
        expectations.forget()
        self._kept: list[tuple[int, int, str | None, str]] = []
        self._stopped: set[tuple[int, str | None]] = set()
        self._holds = Holding(job.claim(claim))
        self._notes: Notes | None = None
        self._watchdog = Watchdog.of_this_process()
        self._watchdog.begin(job, claim)
        if job.careful or (context is not None and context.attemptNumber() > 0):
            self._notes = Notes(job.claim(claim), self._stage.attempt)

    def take(self, events: Events) -> None:
        """Runs these messages in order."""
        handling, stopped, ordered = self._handling, self._stopped, self._job.ordered
        on_dead = cast("Literal['release', 'hold']", self._job.on_dead)
        notes, add, keeps, first = self._notes, self._stage.add, self._job.keeps, handling.first
        runs, idle, states = self._watchdog.runs, self._watchdog.idle, self._states
        if states is not None:
            states.load(events.partition, events.columns.column("key").unique().to_pylist())
        for message, malformed in messages_of(self._job, events, handling.decode):
            partition, offset, key = message.partition, message.offset, message.key
            if (ordered and (partition, key) in stopped) or not self._holds(partition):
                self._report.left(partition, offset)
                if notes is not None:
                    notes.passed()
                continue
            outcome: Outcome | None = None
            cause: str | None = None
            ended = None if notes is None else notes.about_to_run(partition, offset)
            if ended is not None:
                outcome = Outcome("nack", error=ended)
            elif malformed is not None:
                outcome, cause = Outcome("dead", error=malformed), MALFORMED
            else:
                runs(partition, offset)
                try:
                    outputs = handling.outputs(message)
                except BaseException as error:  # also an exit, a cancelled coroutine, a panic of Rust code
                    outcome, cause = outcome_of(error), cause_of(error)
                finally:
                    idle()
            if outcome is None:
                self._ran += 1
                if states is not None:
                    states.done(message)
                for topic, place, encoded, waits in outputs:
                    if topic is not None:
                        add(topic, place, (partition, offset), encoded, waits)
                    if keeps and topic is first:
                        self._kept.append((partition, offset, encoded[0], encoded[2].decode()))
                continue
            self._report.failed(partition, offset, outcome, seconds_or_none(outcome.delay), cause)
            if ordered and key is not None and outcome.stops_key(on_dead):
                stopped.add((partition, key))

    def finish(self) -> Iterator[pa.RecordBatch]:
        """Stages the outputs, and returns the report of the outcomes and the rows for sinks outside."""
        self._report.placed(self._stage.write())
        staged = None if self._states is None else self._states.finish()
        if staged is not None:
            self._report.states(staged)
        self._report.ran(self._claim, self._ran)
        self._report.unmet(expectations.seen())
        if self._notes is not None:
            self._notes.finished()
        if self._job.keeps:
            self._report.kept(self._stage.attempt, len(self._kept))
            yield rows_batch(self._stage.attempt, self._kept)
        yield self._report.batch(keeps=self._job.keeps)

    def give_up(self) -> None:
        """The database failed, not a message: clears the last note, so that its message is not suspected."""
        if self._notes is not None:
            cleared(self._notes.finished)

    def rest(self) -> None:
        """This attempt runs no more messages."""
        self._watchdog.idle()
        self._handling.rest()


class Handling:
    """Calls the handler with a message, and turns its results into rows."""

    def __init__(self, job: Job, handler: Handler) -> None:
        self._handler = cast("Callable[[Message], object]", handler)
        self._sinks = dict(job.sinks)
        self._default = next(iter(job.sinks), None)
        self.first = None if self._default is None else job.sinks[self._default]
        self._layout = Layout(1) if self.first is None else self.first.layout
        self._keeps = job.keeps
        self.decode = plain if job.schema is None else decoder(job.schema)
        self._turn = random.randrange(1 << 16)
        self._timeout, self._since = job.handler_timeout, 0.0
        if self._timeout is not None:
            # one timer for the whole task: setting one for each message would cost more than many handlers
            tick = min(margin(self._timeout) / 2, self._timeout / 4)
            signal.signal(signal.SIGALRM, self._tick)
            signal.setitimer(signal.ITIMER_REAL, tick, tick)

    def _tick(self, _signal: int, _frame: FrameType | None) -> None:
        assert self._timeout is not None
        if self._since and time.monotonic() - self._since > self._timeout:
            self._since = 0.0  # interrupt once; if the handler ignores it, the watchdog kills the process
            raise TimeoutError(TOO_LONG)

    def rest(self) -> None:
        """No more messages follow."""
        if self._timeout is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def outputs(self, message: Message) -> list[Placing]:
        """The destination of each output. Raises what the handler raises."""
        self._since = time.monotonic()
        try:
            returned = self._handler(message)
            if isinstance(returned, GeneratorType):
                returned = list(returned)
        finally:
            self._since = 0.0
        if type(returned) is dict:  # most results are; the checks below take as long as encoding one
            return [self._placed(message, returned)]
        if returned is None:
            return []
        if isinstance(returned, list):
            return [self._placed(message, one) for one in returned]
        _require_result(returned)
        return [self._placed(message, returned)]

    def _placed(self, message: Message, returned: object) -> Placing:
        """The destination of one output. It has the key of its message unless it names another. A partition must be the
        key's own, unless the output allows a split."""
        key, topic, partition, priority, waits, split = message.key, self.first, None, None, False, False
        if not isinstance(returned, Outgoing):
            encoded: codec.Encoded = (key, *codec.encode(returned), None)
            if key is not None and topic is not None and not self._keeps:
                return topic, self._layout.place_key(key), encoded, False
        else:
            name = returned.topic if isinstance(returned, To) else self._default
            if name is not None:
                topic = self._sinks.get(name)
                if topic is None:
                    raise self._unknown(name)
            key, partition = key if returned.key is None else returned.key, returned.partition
            priority, waits, split = returned.priority, returned.delayed, returned.allow_split
            headers, routing_key = delays.staged_headers(returned), returned.routing_key
            encoded = codec.encode_message(
                Outgoing(returned.payload, key=key, headers=headers, routing_key=routing_key)
            )
        if topic is self.first and (self._keeps or topic is None):
            self._require_row(encoded, waits)
        if topic is None:
            return None, 0, encoded, False
        if partition is not None:
            if not 0 <= partition < topic.partitions:
                raise InvalidArgument(
                    f"the topic has no partition {partition}", f"It has {topic.partitions}, numbered from 0."
                )
            topic.layout.require(partition, priority, key, allow_split=split)
        elif key is None:
            self._turn += 1
            partition = topic.layout.place_turn(self._turn, priority)
        else:
            partition = topic.layout.place_key(key, priority)
        return topic, partition, encoded, waits

    def _require_row(self, encoded: codec.Encoded, waits: bool) -> None:
        """Refuses an output without a sink, or one that cannot be a row of its sink."""
        if not self._keeps:
            raise InvalidArgument("the handler returned an output, but the pipeline has no sink", "Give it a sink.")
        if waits:
            raise InvalidArgument("a row of a sink outside cannot be delayed", "Give the delayed output another topic.")
        if encoded[1] == b"b":
            raise InvalidPayload("bytes cannot be a row of a sink outside", "Return text or a JSON value.")

    def _unknown(self, name: str) -> CustodyError:
        return TopicNotFound(
            f"{name!r} is not a sink of the pipeline", f"Name it in sink=[…]. {did_you_mean(name, list(self._sinks))}"
        )


class Notes:
    """Finds a message that ends its process: records messages before they run, so that the last record of a dead
    attempt shows where it died."""

    def __init__(self, claim: TaskClaim, attempt: int) -> None:
        self._claim, self._attempt = claim, attempt
        self._found: dict[tuple[int, int], int] = {}
        seen: Counter[tuple[int, int]] = Counter()
        for partition, offset, size in claim.suspected():
            # Spark also ends healthy workers, when another task fails the job, so a message must have died alone twice
            seen[partition, offset] += size == 1
            self._found[partition, offset] = max(size, self._found.get((partition, offset), size), 2)
        self._found |= {where: 1 for where, times in seen.items() if times > 1}
        self._hung = {(late.partition, late.offset) for late in claim.overdue() if late.stopped}
        self._block = self._singly = 0

    def about_to_run(self, partition: int, offset: int) -> str | None:
        """The error of a message that ended processes before and is not run again; None if it may run."""
        size = self._found.get((partition, offset), 0)
        hung = (partition, offset) in self._hung
        if hung or size == 1:
            self.passed()
            return HUNG if hung else KILLED
        if size > 1:
            self._singly, self._block = max(self._singly, size), 0
        if self._singly > 0:
            self._claim.note_suspect(self._attempt, partition, offset, 1)
        elif self._block == 0:
            self._block = BLOCK
            self._claim.note_suspect(self._attempt, partition, offset, BLOCK)
        self.passed()
        return None

    def passed(self) -> None:
        self._singly = max(0, self._singly - 1)
        self._block = max(0, self._block - 1)

    def finished(self) -> None:
        self._claim.note_suspect(self._attempt, 0, 0, 0)


def cleared(clear: Callable[[], None]) -> None:
    """Clears a note after the database has failed: tries it until the database is there again, for a while."""
    until = time.monotonic() + GIVING_UP
    while True:
        try:
            clear()
            return
        except CustodyError:  # wait for the database to restart; there is nothing else to do
            if time.monotonic() > until:
                return
            time.sleep(0.5)


def _require_result(returned: object) -> None:
    try:
        require_finished(returned)
    except TypeError as error:
        raise WrongResult(str(error)) from None
    if isinstance(returned, tuple | set | frozenset):
        raise WrongResult(
            f"the handler returned a {type(returned).__name__}; for several outputs return a list, or yield them"
        )


_TIMES: dict[int, datetime] = {}


def messages_of(job: Job, events: Events, decode: Callable[[str, bytes], Any]) -> Iterator[tuple[Message, str | None]]:
    """The messages of a batch of columns, each with the error of its payload, if it has one."""
    columns, before, partition, topic = events.columns, events.before.tolist(), events.partition, job.topic
    priority = priority_of(partition) if job.priorities else None
    if len(_TIMES) > 100_000:
        _TIMES.clear()
    for offset, stamp, key, kind, data, headers, entry in zip(
        columns.column("offset").to_pylist(),
        columns.column("published_at").cast(pa.timestamp("us")).cast(pa.int64()).to_pylist(),
        columns.column("key").to_pylist(),
        columns.column("kind").to_pylist(),
        columns.column("payload").to_pylist(),
        columns.column("headers").to_pylist(),
        before,
        strict=True,
    ):
        published_at = _TIMES.get(stamp)
        if published_at is None:  # converted once for each time: messages published together share it
            published_at = _TIMES[stamp] = datetime.fromtimestamp(stamp / 1e6, UTC)
        named: dict[str, str] = {} if headers is None else msgspec.json.decode(headers)
        attempt = 1
        if entry >= 0:
            earlier = events.attempts[entry]
            attempt = earlier.attempt
            named = redelivery_headers(named, attempt, earlier.first_delivery, earlier.last_error)
        malformed = None
        try:
            payload = decode(kind, data)
        except InvalidPayload as error:
            payload, malformed = data, str(error)
        yield (
            Message(
                topic=topic,
                partition=partition,
                offset=offset,
                key=key,
                payload=payload,
                headers=named,
                attempt=attempt,
                published_at=published_at,
                priority=priority,
                topic_uid=job.topic_uid,
            ),
            malformed,
        )
