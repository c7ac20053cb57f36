"""Checks a frame before anything is claimed, by calling it without messages in the driver."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import BinaryType, DataType, IntegerType, LongType, MapType, StringType, StructType

from custody.errors import CustodyError, PipelineRefused
from custody.spark.driver import frame_plan
from custody.spark.faults import described
from custody.spark.tasks.events import EVENTS
from custody.spark.tasks.frame import Frame, outputs, typed

logger = logging.getLogger(__name__)


def check(
    spark: SparkSession, frame: Frame, schema: StructType | None, *, published: bool, keeps: bool = False
) -> bool:
    """Refuses a frame whose rows lose their messages, or whose result depends on which messages share a batch.

    Returns whether rows stay in their task and in order, so that the commit need not sort them.
    """
    try:
        columns = typed(spark.createDataFrame([], EVENTS), schema).schema
    except AnalysisException as error:
        raise PipelineRefused(
            f"the fields of the schema cannot be columns: {described(error)}",
            "If two names differ only in case, set spark.sql.caseSensitive.",
        ) from error
    try:
        result = frame(frame_plan.sample_input(spark, columns))
    except CustodyError:
        raise
    except Exception as error:
        raise PipelineRefused(
            f"the frame raised {type(error).__name__} for an empty input: {described(error)}",
            "Make it work without rows: it is called once at the start, to check its plan, and then for every batch.",
        ) from error
    if not isinstance(result, DataFrame):
        raise PipelineRefused(f"the frame returned {type(result).__name__}, not a DataFrame", "Return one.")
    _check_columns(result)
    narrow = frame_plan.require_message_by_message(result)
    _check_watermark(spark, frame, columns)
    if published and "_key" not in result.columns:
        raise PipelineRefused(
            "the frame's result has no column _key, so its outputs would have no order",
            "Keep the column, or set it: .withColumn('_key', F.lit(None).cast('string')) for no key.",
        )
    try:
        outputs(result, published=published, keeps=keeps)
    except AnalysisException as error:
        raise PipelineRefused(f"the frame's columns cannot be published: {error}") from error
    return narrow


def _check_watermark(spark: SparkSession, frame: Frame, columns: StructType) -> None:
    try:
        result = frame(frame_plan.streaming_input(spark, columns))
    except Exception as error:  # it uses an action, such as count(), which a stream does not support
        logger.debug("the frame cannot be checked for watermarks: %s", described(error))
        return
    if isinstance(result, DataFrame):
        frame_plan.require_no_watermark(result)


def _check_columns(result: DataFrame) -> None:
    wanted: Mapping[str, DataType] = {"_partition": IntegerType(), "_offset": LongType()}
    types: Mapping[str, DataType] = {"_key": StringType(), "_topic": StringType(), "_payload": BinaryType(),
                                     "_headers": MapType(StringType(), StringType())}  # fmt: skip
    found = {field.name: field.dataType for field in result.schema.fields}
    for name, kind in wanted.items():
        if name not in found:
            raise PipelineRefused(
                f"the frame's result has no column {name}, so its rows have no message", frame_plan.PLAIN_SOURCE
            )
        if found[name] != kind:
            raise PipelineRefused(f"the frame's {name} is {found[name].simpleString()}, not {kind.simpleString()}")
    for name, kind in types.items():
        if name in found and found[name].simpleString() != kind.simpleString():
            raise PipelineRefused(
                f"the frame's {name} is {found[name].simpleString()}, not {kind.simpleString()}", "Cast it."
            )
