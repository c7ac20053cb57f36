"""`spark.read.format("custody")` and `spark.readStream.format("custody")`: topics and views as DataFrames."""

from __future__ import annotations

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader
from pyspark.sql.types import StructType

from custody import arrow
from custody.spark.columns import TABLES
from custody.spark.log_reader import LogReader
from custody.spark.log_stream import LogStreamReader
from custody.spark.options import ReadOptions
from custody.spark.view_reader import ViewReader


class CustodySource(DataSource):
    """Made in a process beside the driver, which sees the driver's environment as it was when Spark was started.

    The database is looked for there, once, and its URL goes to the tasks with the reader; Spark shows no option whose
    name has "url" in it.
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
