"""Dry run of a pipeline on the next messages of its group. Nothing is claimed or published."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

import msgspec
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from custody.engine import Custody
from custody.errors import GroupNotFound, InvalidArgument, InvalidPayload
from custody.model import codec
from custody.model.entities import Message
from custody.model.lanes import priority_of
from custody.model.outcomes import Kind, outcome_of
from custody.model.policy import Policy, seconds_or_none
from custody.spark.driver import frame_check
from custody.spark.driver.batch_jobs import parsed, parsed_state
from custody.spark.driver.watching import Watch
from custody.spark.faults import described, fault
from custody.spark.outside.cached_rows import misfit
from custody.spark.pipeline import Pipeline
from custody.spark.running import opened, session_for
from custody.spark.tasks import frame
from custody.spark.tasks.calls import Calls
from custody.spark.tasks.each import Handling
from custody.spark.tasks.events import EVENTS
from custody.spark.tasks.job import Job
from custody.spark.tasks.schema import decoder
from custody.spark.tasks.states import Given, KeyedHandler, States
from custody.spark.tasks.watchdog import margin
from custody.verbs.pipelines import Sink

logger = logging.getLogger(__name__)

_LOOKED = 100_000  # messages of a partition that are scanned for bound ones
_RESULT = "partition int, offset bigint, outcome string, error string, topic string, key string, payload binary"
_ARROW = pa.schema(
    [
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("outcome", pa.string()),
        ("error", pa.string()),
        ("topic", pa.string()),
        ("key", pa.string()),
        ("payload", pa.binary()),
    ]
)


@dataclass(frozen=True, kw_only=True)
class Output:
    """One output. `topic` is the name of a sink outside of the database if it goes to no topic."""

    topic: str
    key: str | None
    payload: Any


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One message with its outcome and its outputs."""

    message: Message
    outcome: Kind
    error: str | None
    outputs: tuple[Output, ...]


def try_out(
    pipeline: Pipeline, database: Custody | str | None, *, limit: int, spark: SparkSession | None, master: str | None
) -> list[Trial]:
    """See `Pipeline.try_out`."""
    if limit < 1:
        raise InvalidArgument(f"the limit is {limit} and must be at least 1")
    pipeline.require_complete()
    with opened(database) as c:
        for topic in (pipeline.source, *pipeline.sinks):
            c.topic(topic)
        messages = _next(pipeline, c, limit)
        if not messages:
            return []
        with session_for(spark, master) as shared:
            schema, timeout = parsed(pipeline.schema), _timeout(pipeline, c)
            states = _states(pipeline, c, messages)
            job = Job(
                url=c.database_url,
                topic=pipeline.source,
                group=pipeline.group,
                group_id=0,
                ordered=False,
                on_dead="release",
                handler_timeout=timeout,
                sinks={
                    name: Sink(number, topic.partitions, topic.priorities)
                    for number, name in enumerate(pipeline.sinks)
                    for topic in [c.topic(name)]
                },
                topic_uid=c.topic(pipeline.source).uid,
                priorities=c.topic(pipeline.source).priorities,
                schema=None if schema is None else schema.jsonValue(),
                keeps=bool(pipeline.outside),
                state=parsed_state(pipeline.state),
            )
            run: Callable[[list[Message]], list[dict[str, Any]]]
            if pipeline.transform is None:
                handled = _handled(job, pipeline, states) if pipeline.handler is not None else _batched(job, pipeline)

                def run(some: list[Message]) -> list[dict[str, Any]]:
                    rows = _events(shared, some).mapInArrow(handled, _RESULT)
                    return _fitting(shared, [row.asDict() for row in rows.collect()], pipeline)

            else:
                published = bool(pipeline.sinks or pipeline.outside)
                transform = pipeline.transform
                frame_check.check(shared, transform, schema, published=bool(pipeline.sinks))

                def run(some: list[Message]) -> list[dict[str, Any]]:
                    result = transform(frame.typed(_events(shared, some), schema))
                    return _framed(frame.outputs(result, published=published), pipeline)

            watch = Watch(shared, trouble=logger.warning)

            def watched(some: list[Message]) -> list[dict[str, Any]]:
                with watch.job("it", None if timeout is None else timeout + margin(timeout)):
                    return run(some)

            with watch.batch("it"):
                return _trials(messages, job, watched)


def _timeout(pipeline: Pipeline, c: Custody) -> float | None:
    """The handler timeout of the pipeline's policy, or of the existing group's."""
    policy = pipeline.policy
    if policy is None:
        with suppress(GroupNotFound):
            policy = c.group(pipeline.source, pipeline.group).policy
    return seconds_or_none((policy or Policy()).handler_timeout)


def _states(pipeline: Pipeline, c: Custody, messages: list[Message]) -> dict[str, bytes]:
    """The stored states of the keys of these messages, if the pipeline is keyed."""
    found: dict[str, bytes] = {}
    keys = {message.key for message in messages if message.key is not None} if pipeline.state is not None else set()
    with suppress(GroupNotFound):
        for key in keys:
            stored = c.key_states(pipeline.source, pipeline.group, key=key)
            found.update((one.key, msgspec.json.encode(one.state)) for one in stored)
    return found


def _next(pipeline: Pipeline, c: Custody, limit: int) -> list[Message]:
    """The next messages that were never delivered to the group, or without a group the first of the log.

    Messages that do not match the bindings are left out.
    """
    bindings = pipeline.bindings or ()
    try:
        partitions = c.stats(pipeline.source, pipeline.group).partitions
        starts = [(part.partition, part.frontier) for part in partitions]
        if pipeline.bindings is None:
            bindings = c.group(pipeline.source, pipeline.group).bindings
    except GroupNotFound:
        starts = list(enumerate(c.topic(pipeline.source).first_offsets))
    found: list[Message] = []
    for partition, start in starts:
        if not bindings:
            found += c.read(pipeline.source, partition, offset=start, max_messages=limit)
            continue
        bound: list[Message] = []
        for offset in range(start, start + _LOOKED, 1000):
            some = c.read(pipeline.source, partition, offset=offset, max_messages=1000)
            bound += [one for one in some if any(binding.matches(one.headers) for binding in bindings)]
            if len(some) < 1000 or len(bound) >= limit:
                break
        found += bound
    return sorted(found, key=lambda message: message.published_at)[:limit]


def _trials(messages: list[Message], job: Job, run: Callable[[list[Message]], list[dict[str, Any]]]) -> list[Trial]:
    malformed: dict[tuple[int, int], str] = {}
    if job.schema is not None:
        fits = decoder(job.schema)
        for message in messages:
            kind, data = codec.encode(message.payload)
            try:
                fits(kind.decode(), data)
            except InvalidPayload as error:
                malformed[message.partition, message.offset] = str(error)
    rows = _all_or_singly([m for m in messages if (m.partition, m.offset) not in malformed], run)
    return [_trial(message, rows, malformed) for message in messages]


def _all_or_singly(
    messages: list[Message], run: Callable[[list[Message]], list[dict[str, Any]]]
) -> list[dict[str, Any]]:
    try:
        return run(messages) if messages else []
    except Exception as error:
        if fault(error) != "row":
            raise
        if len(messages) == 1:
            where = {"partition": messages[0].partition, "offset": messages[0].offset}
            return [{**where, "outcome": "nack", "error": described(error), "payload": None}]
        return [row for message in messages for row in _all_or_singly([message], run)]


def _trial(message: Message, rows: list[dict[str, Any]], malformed: dict[tuple[int, int], str]) -> Trial:
    where = (message.partition, message.offset)
    if where in malformed:
        return Trial(message=message, outcome="dead", error=malformed[where], outputs=())
    mine = [row for row in rows if (row["partition"], row["offset"]) == where]
    bad = next((row for row in mine if row["outcome"] not in (None, "ack")), None)
    if bad is not None:
        return Trial(message=message, outcome=bad["outcome"], error=bad["error"], outputs=())
    outputs = tuple(
        Output(topic=row["topic"], key=row["key"], payload=_shown(bytes(row["payload"])))
        for row in mine
        if row["payload"] is not None
    )
    return Trial(message=message, outcome="ack", error=None, outputs=outputs)


def _shown(payload: bytes) -> Any:
    try:
        return msgspec.json.decode(payload)
    except msgspec.DecodeError:
        return payload


def _events(spark: SparkSession, messages: list[Message]) -> DataFrame:
    """A DataFrame of the messages, with the columns of a claim."""
    rows = []
    for message in messages:
        kind, data = codec.encode(message.payload)
        where, how = (0, message.partition, message.offset), (message.headers, 1, message.published_at)
        rows.append((*where, message.key, kind.decode(), data, *how))
    return spark.createDataFrame(rows, EVENTS).coalesce(1)


def _handled(
    job: Job, pipeline: Pipeline, stored: dict[str, bytes]
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Converts messages to outcomes and outputs, for `mapInArrow`. Runs in an executor."""
    handler, topic, outside = pipeline.handler, job.topic, _first(pipeline)
    assert handler is not None

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        states = None if job.state is None else States(job.state, Given(stored), cast("KeyedHandler", handler))
        handling = Handling(job, handler if states is None else states.handle)
        try:
            yield from handled(batches, handling, states)
        finally:
            handling.rest()

    def handled(
        batches: Iterator[pa.RecordBatch], handling: Handling, states: States | None
    ) -> Iterator[pa.RecordBatch]:
        names = {topic: name for name, topic in job.sinks.items()}
        for batch in batches:
            rows = []
            for event in batch.to_pylist():
                where = {"partition": event["_partition"], "offset": event["_offset"]}
                try:
                    message = Message(
                        topic=topic,
                        partition=event["_partition"],
                        offset=event["_offset"],
                        key=event["_key"],
                        payload=handling.decode(event["_kind"], event["_payload"]),
                        headers=dict(event["_headers"] or {}),
                        attempt=1,
                        published_at=event["_published_at"],
                        priority=priority_of(event["_partition"]) if job.priorities else None,
                        topic_uid=job.topic_uid,
                    )
                    if states is not None:
                        states.load(message.partition, [message.key])
                    outputs = handling.outputs(message)
                    if states is not None:
                        states.done(message)
                except BaseException as error:  # also an exit, a cancelled coroutine, a panic of Rust code
                    outcome = outcome_of(error)
                    rows.append({**where, "outcome": outcome.kind, "error": outcome.error})
                    continue
                rows.append({**where, "outcome": "ack"})
                rows += [
                    {**where, "topic": names[sink] if sink else outside, "key": key, "payload": payload}
                    for sink, _, (key, _, payload, _), _ in outputs
                ]
            yield pa.RecordBatch.from_pylist(rows, schema=_ARROW)

    return run


def _batched(job: Job, pipeline: Pipeline) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """The same for a handler of batches."""
    handler, outside = pipeline.batch_handler, _first(pipeline)
    assert handler is not None

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        names, calls = {topic: name for name, topic in job.sinks.items()}, Calls(job, handler)
        for batch in batches:
            rows: list[dict[str, Any]] = []
            where = batch.select(["_partition", "_offset"]).rename_columns(["partition", "offset"]).to_pylist()
            found = calls.of(batch)
            rows += [
                {**where[row], "outcome": failure.outcome.kind, "error": failure.outcome.error}
                for row, failure in found.failed.items()
            ]
            rows += [{**where[row], "outcome": "release"} for row in found.left]
            for row, outputs in found.done.items():
                rows.append({**where[row], "outcome": "ack"})
                rows += [
                    {**where[row], "topic": names[sink] if sink else outside, "key": key, "payload": payload}
                    for sink, _, (key, _, payload, _) in outputs
                ]
            yield pa.RecordBatch.from_pylist(rows, schema=_ARROW)

    return run


def _fitting(spark: SparkSession, rows: list[dict[str, Any]], pipeline: Pipeline) -> list[dict[str, Any]]:
    """The same rows, but a message fails if its result does not fit the schema of a sink outside."""
    schemas = [parsed(sink.schema) for sink in pipeline.outside]
    outside = [row for row in rows if row["topic"] == _first(pipeline) and row["payload"] is not None]
    if not outside or not any(schemas):
        return rows
    texts = spark.createDataFrame([(bytes(row["payload"]).decode(),) for row in outside], "payload string").coalesce(1)
    found = texts.select(misfit(schemas).alias("misfit")).collect()
    failures = [
        {**row, "outcome": "nack", "error": one["misfit"], "payload": None}
        for row, one in zip(outside, found, strict=True)
        if one["misfit"] is not None
    ]
    return [*failures, *rows]


def _first(pipeline: Pipeline) -> str | None:
    """The sink of results that name no topic."""
    return next(iter([*pipeline.sinks, *(sink.name for sink in pipeline.outside)]), None)


def _framed(outputs: DataFrame, pipeline: Pipeline) -> list[dict[str, Any]]:
    rows = []
    for row in outputs.collect():
        failure = row["_failure"]
        rows.append(
            {
                "partition": row["_partition"],
                "offset": row["_offset"],
                "outcome": None if failure is None else failure["outcome"],
                "error": None if failure is None else failure["error"],
                "topic": row["_topic"] or _first(pipeline),
                "key": row["_key"],
                "payload": row["payload"],
            }
        )
    return rows
