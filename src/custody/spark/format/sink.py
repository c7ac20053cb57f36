"""`df.write.format("custody").mode("append")` and `df.writeStream.format("custody")`: rows become messages of a topic.

A write is all or nothing, and retried tasks publish nothing twice. A streaming batch that Spark replays is published
once, as long as the checkpoint exists; a query with a new checkpoint publishes everything again. The messages of a key
keep their order only within a task. If the order matters, bring the rows of a key into one task first:
`df.repartition("key").sortWithinPartitions("key", "at")`.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any
from uuid import uuid4

import msgspec
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    ByteType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    NullType,
    ShortType,
    StringType,
    StructType,
    VariantType,
)

from custody.errors import InvalidArgument, InvalidPayload, PartitionNotFound, StageLost, did_you_mean
from custody.model import codec
from custody.model.entities import Outgoing
from custody.spark.database import arrow, sinks
from custody.spark.database.tasks import Stage
from custody.spark.format.options import boolean
from custody.verbs.pipelines import Sink, StagedCount

FLUSH = 64 * 2**20
"""Bytes that a task collects before it stages them."""

_OPTIONS = ["url", "topic", "payloadKind", "allowSplit"]
_OF_SPARK = ["checkpointlocation", "queryname"]  # options that Spark itself passes to a streaming sink
_TEXT, _WHOLE = (StringType, NullType), (ByteType, ShortType, IntegerType, LongType, NullType)
_COLUMNS: dict[str, tuple[tuple[type[DataType], ...], str]] = {
    "topic": (_TEXT, "string"),
    "partition": (_WHOLE, "int"),
    "key": (_TEXT, "string"),
    "payload": ((BinaryType, StringType), "string or binary"),
    "payload_kind": (_TEXT, "string"),
    "headers": ((MapType, NullType), "map<string,string>"),
}
_OF_THE_LOG = ["offset", "published_at"]


@dataclass(frozen=True, kw_only=True)
class Target:
    """The destination and columns of the rows. The URL may contain a password, so `repr` omits it."""

    url: str = field(repr=False)
    topic: str | None
    kind: str
    columns: tuple[str, ...]
    allow_split: bool = False

    @classmethod
    def parse(cls, given: Mapping[str, str], schema: StructType) -> Target:
        """Reads Spark's options, whose names are case-insensitive, and checks the columns. Runs on the driver."""
        values = {name.lower(): value for name, value in given.items()}
        for name in values:
            if name not in [*map(str.lower, _OPTIONS), *_OF_SPARK]:
                raise InvalidArgument(f"{name!r} is not an option of the sink custody", did_you_mean(name, _OPTIONS))
        _check_columns(schema)
        columns = tuple(schema.names)
        topic = values.get("topic")
        if not topic and "topic" not in columns:
            raise InvalidArgument(
                "there is neither an option nor a column topic", "Give the topic: .option('topic', 'orders')."
            )
        usual = "bytes" if isinstance(schema["payload"].dataType, BinaryType) else "json"
        kind = values.get("payloadkind", usual).lower()
        _require_kind(kind)
        return cls(
            url=arrow.locate(values.get("url")),
            topic=topic or None,
            kind=kind,
            columns=columns,
            allow_split=boolean("allowSplit", values.get("allowsplit", "false")),
        )


def _check_columns(schema: StructType) -> None:
    """Refuses columns that cannot be written, instead of ignoring them."""
    for column in schema:
        name, kind = column.name, column.dataType
        if name in _OF_THE_LOG:
            raise InvalidArgument(f"the column {name} is set by the log", f"Leave it out: .drop({name!r}).")
        if name not in _COLUMNS:
            raise InvalidArgument(
                f"a message has no column {name!r}",
                f"{did_you_mean(name, list(_COLUMNS))} Put fields of the payload into it with to_json, and drop() the "
                "rest.",
            )
        if schema.names.count(name) > 1:
            raise InvalidArgument(f"there are two columns {name!r}", "Drop or rename one of them.")
        allowed, told = _COLUMNS[name]
        # for a map, the types of its keys and values are compared too
        if not isinstance(kind, allowed) or (isinstance(kind, MapType) and kind.simpleString() != told):
            wanted = told.split()[0]
            raise InvalidArgument(
                f"the column {name} is {kind.simpleString()}, not {told}", _remedy(name, kind, wanted)
            )
    if "payload" not in schema.names:
        raise InvalidArgument(
            "there is no column payload",
            "Create it, for example .select('key', to_json(struct('sku', 'amount')).alias('payload')).",
        )


def _remedy(name: str, kind: DataType, wanted: str) -> str:
    if name == "payload" and isinstance(kind, StructType | MapType | ArrayType | VariantType):
        return "Convert it to JSON: .withColumn('payload', to_json('payload'))."
    return f"Convert it: .withColumn({name!r}, col({name!r}).cast({wanted!r}))."


def _require_kind(kind: str) -> None:
    if kind not in codec.KINDS:
        raise InvalidArgument(f"there is no kind of payload {kind!r}", did_you_mean(kind, list(codec.KINDS)))


@dataclass(frozen=True)
class Staged(WriterCommitMessage):
    """A task's message to the driver: its stage, the counts of what it staged, and the query."""

    stage: str
    placed: tuple[StagedCount, ...]
    query: str | None = None


class BatchSink(DataSourceArrowWriter):
    """Writes a DataFrame once. Created on the driver and pickled, so tasks and commit have the same stage."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._stage = f"staged_sink_{uuid4().hex}"
        if target.topic is not None:
            sinks.topic(target.url, target.topic)  # refuses a wrong name before anything runs

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Staged:
        """Runs in a task."""
        return Staged(self._stage, Attempt(self._target, self._stage).run(iterator))

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Runs on the driver, when every task has written."""
        placed = [place for message in _all_staged(messages) for place in message.placed]
        if placed:
            sinks.commit(self._target.url, self._stage, placed)

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:  # noqa: ARG002
        """Runs on the driver, when a task or the commit has failed."""
        sinks.drop_stage(self._target.url, self._stage)


class StreamSink(DataSourceStreamArrowWriter):
    """Writes the batches of a stream. Spark creates one instance for tasks and another for each commit; they share only
    the tasks' messages."""

    def __init__(self, target: Target) -> None:
        self._target = target

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Staged:
        """Runs in a task, the only place where the query is known."""
        context = TaskContext.get()
        query = context and context.getLocalProperty("sql.streaming.queryId")
        batch = context and context.getLocalProperty("streaming.sql.batchId")
        if not query or not batch:
            raise InvalidArgument("the sink custody supports micro-batches only", "Use another trigger.")
        stage = f"staged_sink_{hashlib.sha256(f'{query} {batch}'.encode()).hexdigest()[:32]}"
        return Staged(stage, Attempt(self._target, stage).run(iterator), query)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        """Runs on the driver. For a batch without rows there is nothing to do."""
        staged = [message for message in _all_staged(messages) if message.placed]
        if staged:
            placed = [place for message in staged for place in message.placed]
            sinks.commit(self._target.url, staged[0].stage, placed, query=staged[0].query, batch=batchId)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: ARG002
        """Runs on the driver. If no task has finished, the stage is not known; a replay reuses it."""
        for stage in {message.stage for message in messages if isinstance(message, Staged)}:
            sinks.drop_stage(self._target.url, stage)


def _all_staged(messages: Sequence[WriterCommitMessage | None]) -> list[Staged]:
    staged = [message for message in messages if isinstance(message, Staged)]
    if len(staged) < len(messages):
        raise StageLost("a task has not reported what it staged", "Run the batch again.")
    return staged


class Attempt:
    """One attempt of a task: rows in, staged messages out. Only attempts that a commit names are published."""

    def __init__(self, target: Target, stage: str) -> None:
        self._target, self._name = target, stage
        self._stage = Stage(target.url, stage)
        self._topics: dict[str, Sink] = {}
        self._turn = random.randrange(1 << 16)

    def run(self, batches: Iterator[pa.RecordBatch]) -> tuple[StagedCount, ...]:
        placed: list[StagedCount] = []
        rows = size = 0
        for batch in batches:
            self._take(batch)
            rows, size = rows + batch.num_rows, size + batch.nbytes
            if size >= FLUSH:
                placed += self._flush()
                rows = size = 0
        if rows:
            placed += self._flush()
        return tuple(placed)

    def _flush(self) -> list[StagedCount]:
        # only now, so that an attempt that fails before leaves nothing behind
        sinks.open_stage(self._target.url, self._name)
        placed = self._stage.write()
        self._stage = Stage(self._target.url, self._name)
        return placed

    def _take(self, batch: pa.RecordBatch) -> None:
        columns = dict(zip(self._target.columns, batch.columns, strict=True))
        # not as text: Arrow would refuse the whole batch if one row had invalid UTF-8
        columns["payload"] = columns["payload"].cast(pa.large_binary())
        rows = zip(*(columns[name].to_pylist() if name in columns else repeat(None) for name in _COLUMNS), strict=False)
        for topic, partition, key, payload, kind, headers in rows:
            name = self._target.topic if topic is None else topic
            if name is None:
                raise InvalidArgument(f"{_row(key)} has no topic", "Give it one, or use the option topic.")
            there = self._topics.get(name)
            if there is None:
                there = self._topics[name] = sinks.topic(self._target.url, name)
            encoded = self._encode(key, payload, kind, headers)
            self._stage.add(there, self._place(name, there, partition, key), (0, 0), encoded)

    def _place(self, name: str, topic: Sink, partition: int | None, key: str | None) -> int:
        if partition is not None:
            if not 0 <= partition < topic.partitions:
                raise PartitionNotFound(
                    f"{name} has no partition {partition}", f"It has {topic.partitions}, numbered from 0."
                )
            topic.layout.require(partition, None, key, allow_split=self._target.allow_split)
            return partition
        if key is not None:
            return topic.layout.place_key(key)
        self._turn += 1
        return topic.layout.place_turn(self._turn)

    def _encode(
        self, key: str | None, payload: bytes | None, kind: str | None, headers: Sequence[tuple[str, Any]] | None
    ) -> codec.Encoded:
        if payload is None:
            raise InvalidPayload(f"{_row(key)} has no payload", "Leave such rows out, or write the JSON null.")
        kind = self._target.kind if kind is None else kind
        _require_kind(kind)
        code = codec.KINDS[kind]
        try:
            codec.decode(code, payload)
            encoded = codec.encode_message(Outgoing(b"", key=key, headers=dict(headers or ())))
        except InvalidPayload as error:
            raise InvalidPayload(f"{_row(key)}: {error.message}", error.remedy) from error
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise InvalidPayload(
                f"the payload of {_row(key)} is not {kind}: {error}",
                "Write JSON with to_json(), or give its kind: .option('payloadKind', 'text') or 'bytes'.",
            ) from error
        return encoded[0], code.encode(), payload, encoded[3]


def _row(key: str | None) -> str:
    return "a row without a key" if key is None else f"the row with the key {key!r}"
