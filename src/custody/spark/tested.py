"""Runs the handler of a pipeline on messages of a test, without Spark and without a database: `Pipeline.test`.

Payloads are checked against the schema, failures release the later messages of their key, and outputs are encoded as in
a pipeline. What only Spark does is left out: frames, sinks outside, timeouts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any, Literal, NamedTuple, cast, overload

import msgspec
import numpy as np
import pyarrow as pa

from custody.errors import InvalidArgument, PipelineRefused
from custody.model import codec
from custody.model.entities import Message, Outgoing
from custody.model.outcomes import Kind, Outcome, outcome_of
from custody.model.policy import Policy, seconds_or_none
from custody.spark import expectations
from custody.spark.batch_handlers import BatchHandler
from custody.spark.database.tasks import Attempts
from custody.spark.pipeline import Pipeline
from custody.spark.tasks.calls import Calls
from custody.spark.tasks.ddl import fields_of
from custody.spark.tasks.each import Handler, Handling, messages_of
from custody.spark.tasks.events import Events, frame_columns
from custody.spark.tasks.job import Job
from custody.spark.tasks.states import Given, KeyedHandler, States
from custody.verbs.pipelines import Sink

WHEN = datetime(2026, 1, 1, tzinfo=UTC)
_PARTITIONS = 4
_COLUMNS = pa.schema(
    [
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("published_at", pa.timestamp("us", "UTC")),
        ("key", pa.string()),
        ("kind", pa.string()),
        ("payload", pa.binary()),
        ("headers", pa.string()),
    ]
)


@dataclass(frozen=True, kw_only=True)
class TestOutput:
    """An output. `topic` is None if the pipeline has only sinks outside of the database."""

    __test__ = False  # although pytest takes it for a class of tests

    topic: str | None
    key: str | None
    payload: Any
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TestedMessage:
    """A message with its outcome. `release`: it was not handled, because an earlier message of its key failed."""

    __test__ = False

    message: Message
    outcome: Kind
    error: str | None
    delay: float | None
    outputs: tuple[TestOutput, ...]


@dataclass(frozen=True, kw_only=True)
class Tested(Sequence[TestedMessage]):
    """What a pipeline would make of the messages, in their order."""

    __test__ = False

    messages: tuple[TestedMessage, ...]
    unmet: Mapping[str, int]
    """How many messages do not meet each expectation that some do not meet."""
    states: Mapping[str, Any] = field(default_factory=dict)
    """What a keyed handler leaves, by key."""

    @overload
    def __getitem__(self, number: int, /) -> TestedMessage: ...

    @overload
    def __getitem__(self, number: slice, /) -> tuple[TestedMessage, ...]: ...

    def __getitem__(self, number: int | slice, /) -> TestedMessage | tuple[TestedMessage, ...]:
        return self.messages[number]

    def __len__(self) -> int:
        return len(self.messages)

    @property
    def outcomes(self) -> list[Kind]:
        return [one.outcome for one in self.messages]

    @property
    def errors(self) -> list[str | None]:
        return [one.error for one in self.messages]

    @property
    def outputs(self) -> list[TestOutput]:
        return [output for one in self.messages for output in one.outputs]


class Found(NamedTuple):
    """The outcome of a message, or None if it is done, and its outputs: a sink and the encoded row of each."""

    outcome: Outcome | None
    outputs: list[tuple[Sink | None, codec.Encoded]]


Runner = Callable[[Job, Events], tuple[list[Found], Counter[str]]]
"""Runs the handler on all messages, in the order of the log; also counts the expectations that are not met."""
_RELEASED = Found(Outcome("release"), [])


def outcomes_of(
    pipeline: Pipeline,
    messages: Iterable[object],
    *,
    key: str | None,
    attempt: int,
    last_error: str | None,
    states: Mapping[str, Any],
) -> Tested:
    """See `Pipeline.test`."""
    pipeline.require_complete()
    kind = pipeline.state
    if kind is not None and isinstance(kind.kind, str):
        kind = kind.parsed(fields_of(kind.kind))
    codec_of_states = None if kind is None else kind.codec()
    if codec_of_states is None and states:
        raise InvalidArgument(f"{pipeline!r} keeps no states", "Leave states out: they are for keyed.")
    given = Given(
        {} if codec_of_states is None else {key: codec_of_states.encode(key, one) for key, one in states.items()}
    )
    run = _runner(pipeline, given)
    events = _events([codec.encode_message(_outgoing(one, key)) for one in messages], attempt, last_error)
    policy = pipeline.policy or Policy()
    job = Job(
        url="",
        topic=pipeline.source,
        group=pipeline.group,
        group_id=0,
        ordered=policy.ordering == "key",
        on_dead=policy.on_dead,
        handler_timeout=None,
        sinks={name: Sink(number, _PARTITIONS) for number, name in enumerate(pipeline.sinks, 1)},
        schema=None if pipeline.schema is None else fields_of(pipeline.schema),
        keeps=bool(pipeline.outside),
        state=kind,
    )
    names = {sink: name for name, sink in job.sinks.items()}
    seen = [message for message, _ in messages_of(job, events, codec.decode)]
    found, unmet = run(job, events)
    return Tested(
        messages=tuple(_tested(message, one, names) for message, one in zip(seen, found, strict=True)),
        unmet=dict(sorted(unmet.items())),
        states={}
        if codec_of_states is None
        else {key: codec_of_states.decode(key, one) for key, one in given.left().items()},
    )


def _runner(pipeline: Pipeline, given: Given) -> Runner:
    """Runs a handler of this kind: a line for each kind."""
    if pipeline.handler is not None:
        return partial(_each, pipeline.handler, given)
    if pipeline.batch_handler is not None:
        return partial(_batch, pipeline.batch_handler)
    raise PipelineRefused(
        f"{pipeline!r} has a frame, which only Spark can run",
        "Call its function with a DataFrame of your own, or use pipeline.try_out.",
    )


def _each(handler: Handler, given: Given, job: Job, events: Events) -> tuple[list[Found], Counter[str]]:
    states = None if job.state is None else States(job.state, given, cast("KeyedHandler", handler))
    handling = Handling(job, handler if states is None else states.handle)
    on_dead = cast("Literal['release', 'hold']", job.on_dead)
    expectations.forget()
    stopped: set[str] = set()
    results: list[Found] = []
    for message, malformed in messages_of(job, events, handling.decode):
        if message.key in stopped:
            results.append(_RELEASED)
            continue
        outcome: Outcome | None = None
        outputs: list[tuple[Sink | None, codec.Encoded]] = []
        if malformed is not None:
            outcome = Outcome("dead", error=malformed)
        else:
            try:
                if states is not None:
                    states.load(message.partition, [message.key])
                outputs = [(sink, encoded) for sink, _, encoded, _ in handling.outputs(message)]
            except Exception as error:
                outcome = outcome_of(error)
        if states is not None and outcome is None:
            states.done(message)
        results.append(Found(outcome, outputs))
        if outcome is not None and job.ordered and message.key is not None and outcome.stops_key(on_dead):
            stopped.add(message.key)
    return results, expectations.seen()


def _batch(handler: BatchHandler, job: Job, events: Events) -> tuple[list[Found], Counter[str]]:
    calls, columns = Calls(job, handler), frame_columns(events)
    results: list[Found] = []
    unmet: Counter[str] = Counter()
    for first in range(0, columns.num_rows, handler.rows):
        rows = columns.slice(first, handler.rows)
        found = calls.of(rows)
        unmet.update(found.unmet)
        for row in range(rows.num_rows):
            if row in found.done:
                results.append(Found(None, [(sink, encoded) for sink, _, encoded in found.done[row]]))
            else:
                results.append(Found(found.failed[row].outcome, []) if row in found.failed else _RELEASED)
    return results, unmet


def _outgoing(one: object, key: str | None) -> Outgoing:
    """A message of the test: a payload, an `Outgoing`, or a `Message` from elsewhere."""
    if isinstance(one, Message):
        return Outgoing(one.payload, key=one.key, headers=one.headers)
    return one if isinstance(one, Outgoing) else Outgoing(one, key=key)


def _events(encoded: Sequence[codec.Encoded], attempt: int, last_error: str | None) -> Events:
    """The messages as a task reads them: in one partition, in their order."""
    count = len(encoded)
    rows = [
        {
            "partition": 0,
            "offset": offset,
            "published_at": WHEN,
            "key": key,
            "kind": kind.decode(),
            "payload": payload,
            "headers": None if headers is None else headers.decode(),
        }
        for offset, (key, kind, payload, headers) in enumerate(encoded)
    ]
    earlier = [] if attempt == 1 else [Attempts(((0, count),), attempt, WHEN, last_error)]
    before = np.full(count, 0 if earlier else -1)
    return Events(0, 0, pa.RecordBatch.from_pylist(rows, schema=_COLUMNS), before, earlier)


def _tested(message: Message, found: Found, names: Mapping[Sink, str]) -> TestedMessage:
    outcome = found.outcome or Outcome("ack")
    return TestedMessage(
        message=message,
        outcome=outcome.kind,
        error=outcome.error,
        delay=seconds_or_none(outcome.delay),
        outputs=tuple(
            TestOutput(
                topic=None if sink is None else names[sink],
                key=key,
                payload=codec.decode(kind.decode(), payload),
                headers={} if headers is None else msgspec.json.decode(headers),
            )
            for sink, (key, kind, payload, headers) in found.outputs
        ),
    )
