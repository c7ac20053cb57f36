"""`format("custody")`: reads topics and views, and writes messages, as batches and streams."""

from __future__ import annotations

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

from custody.errors import InvalidArgument
from custody.spark.database import arrow
from custody.spark.format.columns import TABLES
from custody.spark.format.log_reader import LogReader
from custody.spark.format.log_stream import LogStreamReader
from custody.spark.format.options import ReadOptions
from custody.spark.format.sink import BatchSink, StreamSink, Target
from custody.spark.format.view_reader import ViewReader


class CustodySource(DataSource):
    """Created in a process beside the driver, which has the driver's environment from when Spark was started.

    The database is located there, once, and its URL is sent to the tasks with the reader or writer. Spark shows no
    option whose name contains "url".
    """

    @classmethod
    def name(cls) -> str:
        return "custody"

    def schema(self) -> StructType:
        return TABLES[ReadOptions.parse(self.options).table]

    def reader(self, schema: StructType) -> DataSourceReader:  # noqa: ARG002 - Spark itself compares it with the rows
        options = ReadOptions.parse(self.options)
        url = arrow.locate(options.url)
        return LogReader(url, options) if options.table == "events" else ViewReader(url, options)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: ARG002
        options = ReadOptions.parse(self.options, streaming=True)
        return LogStreamReader(arrow.locate(options.url), options)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        if overwrite:
            raise InvalidArgument("a topic cannot be overwritten", "Use .mode('append').")
        return BatchSink(Target.parse(self.options, schema))

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        """Also called for each commit, in another process."""
        if overwrite:
            raise InvalidArgument("a topic cannot be overwritten", "Use .outputMode('append') or 'update'.")
        return StreamSink(Target.parse(self.options, schema))
