"""Pipelines from DataFrame to DataFrame: typed columns, failures as a column, and the message's identity.

A frame's rows keep `_partition` and `_offset`, so every output row has its message. A plan that would lose them is
refused (see `driver/frame_check`). Rows that a user's function returns are checked here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import StringType, StructField, StructType

from custody.errors import InvalidPayload, PipelineRefused, TopicNotFound, did_you_mean
from custody.model import codec
from custody.model.outcomes import Kind, Outcome
from custody.model.policy import Duration, seconds_or_none
from custody.spark.database.tasks import Stage
from custody.spark.expectations import UNMET, On, reason
from custody.spark.tasks.events import second_try
from custody.spark.tasks.job import DATA, MADE_BY, Job, Report

Frame = Callable[[DataFrame], DataFrame]

_CORRUPT = "_corrupt"
_FAILURE = "_failure"
_UTC = {"timeZone": "UTC"}  # the meaning of a payload must not depend on the session's time zone


def fail_when(
    condition: Column, reason: str | Column, *, dead: bool = False, retry_after: Duration | None = None
) -> Callable[[DataFrame], DataFrame]:
    """For `DataFrame.transform`: a message with a row that meets the condition fails with this reason.

    With `dead` it is dead at once; `retry_after` replaces the policy's backoff. If a row meets several conditions, the
    first counts. A failed message publishes nothing, and with ordering by key the later ones of its key wait.
    """
    return _marked(condition, "dead" if dead else "nack", reason, seconds_or_none(retry_after))


def skip_when(condition: Column, reason: str | Column) -> Callable[[DataFrame], DataFrame]:
    """For `DataFrame.transform`: a message whose row meets the condition is skipped with this reason.

    It counts as done and publishes nothing. A filter does the same without a trace in the journal.
    """
    return _marked(condition, "skip", reason, None)


def _marked(
    condition: Column, kind: Kind, reason: str | Column, delay: float | None
) -> Callable[[DataFrame], DataFrame]:
    text = F.lit(reason) if isinstance(reason, str) else reason.cast("string")
    seconds = F.lit(delay).cast("double")
    failure = F.struct(F.lit(kind).alias("outcome"), text.alias("error"), seconds.alias("delay"))

    def mark(frame: DataFrame) -> DataFrame:
        earlier = F.col(_FAILURE) if _FAILURE in frame.columns else F.lit(None)
        return frame.withColumn(_FAILURE, F.coalesce(earlier, F.when(condition, failure)))

    return mark


def expecting(name: str, condition: Column, on: On) -> Callable[[DataFrame], DataFrame]:
    """What `expect` returns for a Column: adds the name to the column `_unmet` of the rows that do not meet it."""
    unmet = ~F.coalesce(condition.cast("boolean"), F.lit(False))

    def mark(frame: DataFrame) -> DataFrame:
        earlier = F.col(UNMET) if UNMET in frame.columns else F.lit(None).cast("array<string>")
        names = F.concat(F.coalesce(earlier, F.array().cast("array<string>")), F.array(F.lit(name)))
        noted = frame.withColumn(UNMET, F.when(unmet, names).otherwise(earlier))
        return noted if on == "warn" else noted.transform(fail_when(unmet, reason(name), dead=on == "dead"))

    return mark


def typed(messages: DataFrame, schema: StructType | None) -> DataFrame:
    """The messages with a column for each field of the schema. Runs on the driver."""
    if schema is None:
        return messages.drop("_claim")
    read = StructType([*schema.fields, StructField(_CORRUPT, StringType())])
    options = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": _CORRUPT, **_UTC}
    parsed = messages.withColumn("_row", F.from_json(F.col("_payload").cast("string"), read, options))
    # the task that read it has checked it; if Spark is stricter, the row breaks the job and is isolated
    wrong = F.raise_error(F.concat(F.lit("the payload does not fit the schema: "), F.col(f"_row.{_CORRUPT}")))
    offset = F.when(F.col(f"_row.{_CORRUPT}").isNotNull(), wrong.cast("bigint")).otherwise(F.col("_offset"))
    kept = [name for name in parsed.columns if name not in ("_row", "_claim", "_offset")]
    return parsed.select(offset.alias("_offset"), *kept, *(F.col(f"_row.`{field.name}`") for field in schema.fields))


def outputs(result: DataFrame, *, published: bool, keeps: bool = False) -> DataFrame:
    """The rows that tasks stage, made from the frame's result. Runs on the driver.

    Columns without an underscore make the payload, a JSON object; if there are none, `_payload` is published unchanged.
    For sinks outside the columns are kept too.
    """
    data = [name for name in result.columns if not name.startswith("_")]
    none: dict[str, Column] = {
        "_topic": F.lit(None).cast("string"),
        "_key": F.lit(None).cast("string"),
        "_headers": F.lit(None).cast("map<string,string>"),
        _FAILURE: F.lit(None).cast("struct<outcome:string,error:string,delay:double>"),
        UNMET: F.lit(None).cast("array<string>"),
    }
    if not published:
        kind, payload = F.lit("j"), F.lit(None).cast("binary")
    elif data:
        fields = F.struct(*(F.col(f"`{name}`") for name in data))
        kind, payload = F.lit("j"), F.to_json(fields, {"ignoreNullFields": "false", **_UTC}).cast("binary")
    else:
        kind, payload = F.col("_kind"), F.col("_payload").cast("binary")
    return result.select(
        F.col("_partition"),
        F.col("_offset"),
        kind.alias("kind"),
        payload.alias("payload"),
        *(F.col(name) if name in result.columns else empty.alias(name) for name, empty in none.items()),
        *([_as_row(data).alias(DATA)] if keeps else []),
    )


def _as_row(data: list[str]) -> Column:
    return F.struct(*([F.col(f"`{name}`") for name in data] or [F.col("_payload").cast("string").alias("payload")]))


def stager(job: Job, claim: int) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """For `mapInArrow`: output rows in, the task's report out."""

    def stage(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        rows = list(batches)
        report, staged = Report(), job.claim(claim).stage()
        if job.retry == "skip" and second_try():
            report.broken(TaskContext.get().partitionId())  # type: ignore[union-attr]  # there is one
            yield report.batch()
            return
        if rows:
            table = pa.Table.from_batches(rows)
            # after a join, rows of a task are in another order; the sort is stable for rows of one message
            table = table.take(pc.sort_indices(table, [("_partition", "ascending"), ("_offset", "ascending")]))
            _require_messages(table)
            if job.keeps:
                made_by = table.column(MADE_BY).to_pylist()
                table = table.filter(pc.is_valid(table.column("_partition")))
                made = Counter(table.column(MADE_BY).to_pylist())
                for attempt in set(made_by):
                    report.kept(attempt, made[attempt])
            _stage(job, table, report, staged)
            report.unmet(_unmet(table))
        report.placed(staged.write())
        report.ran(claim, 0)
        yield report.batch()

    return stage


def _require_messages(table: pa.Table) -> None:
    """Refuses rows without a message, which only a user's function can make. The mark of a task has no kind."""
    without = pc.or_(pc.is_null(table.column("_partition")), pc.is_null(table.column("_offset")))
    if pc.any(pc.and_(without, pc.is_valid(table.column("kind")))).as_py():
        raise PipelineRefused(
            "the frame made a row whose _partition or _offset is null, so it belongs to no message",
            "In mapInPandas, mapInArrow and applyInPandas, return both columns unchanged.",
        )


def _unmet(table: pa.Table) -> Counter[str]:
    """How many messages do not meet each expectation."""
    some = table.select(["_partition", "_offset", UNMET]).filter(pc.is_valid(table.column(UNMET)))
    found = {(row["_partition"], row["_offset"], name) for row in some.to_pylist() for name in row[UNMET]}
    return Counter(name for _, _, name in found)


def _stage(job: Job, table: pa.Table, report: Report, staged: Stage) -> None:
    default = next(iter(job.sinks), None)
    turn = staged.attempt
    layouts = {name: topic.layout for name, topic in job.sinks.items()}
    places: dict[tuple[str, str], int] = {}  # of keys that have been checked
    names = ("_partition", "_offset", "kind", "payload", "_topic", "_key", "_headers", _FAILURE)
    for partition, offset, kind, payload, name, key, headers, failure in zip(
        *(table.column(one).to_pylist() for one in names), strict=True
    ):
        if failure is not None:
            outcome = Outcome(failure["outcome"], error=failure["error"], delay=failure["delay"])
            report.failed(partition, offset, outcome, failure["delay"])
            continue
        wanted = name or default
        if wanted is None:
            continue
        topic = job.sinks.get(wanted)
        if topic is None:
            known = did_you_mean(wanted, list(job.sinks))
            error = TopicNotFound(f"{wanted!r} is not a sink of the pipeline", f"Name it in sink=[…]. {known}")
            report.failed(partition, offset, Outcome("nack", error=str(error)), None, "TopicNotFound in the frame")
            continue
        if payload is None:
            report.failed(partition, offset, Outcome("nack", error="the frame returned a payload that is null"), None)
            continue
        try:
            if key is None:
                turn += 1
                place = layouts[wanted].place_turn(turn)
            elif (found := places.get((wanted, key))) is not None:
                place = found
            else:
                codec.require_key(key)
                place = places[wanted, key] = layouts[wanted].place_key(key)
            # Custody's headers about a delivery are not passed on to outputs
            named = headers and {k: v for k, v in headers if not k.startswith("x-custody-")}
            encoded = codec.encode_headers(named) if named else None
        except InvalidPayload as error:
            report.failed(partition, offset, Outcome("nack", error=f"InvalidPayload: {error}"), None)
            continue
        staged.add(topic, place, (partition, offset), (key, kind.encode(), payload, encoded))
