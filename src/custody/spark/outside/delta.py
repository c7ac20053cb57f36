"""Rows of done messages in a Delta table, each exactly once, by delta-rs. Runs in the driver.

The pipeline's id is the application of a Delta transaction, and the claim its version. Delta refuses a second commit
with the same application that began before the first one ended.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from custody import extras
from custody.errors import InvalidArgument, PipelineFailed
from custody.spark.outside.lake import Chunks, Lake, Shape
from custody.spark.outside.sinks import Write

if TYPE_CHECKING:
    from deltalake import DeltaTable
    from pyspark.sql.types import StructType

_CHECK = "delta.constraints."


class Delta(Lake):
    """A Delta table at a path that the driver and all executors can reach. It is made if there is none.

    A new table has `_partition`, `_offset` and `_key` and the columns of the rows; in one that exists the first three
    may be missing. `storage_options` are those of delta-rs.
    """

    def __init__(
        self,
        path: str,
        *,
        partition_by: Sequence[str] = (),
        storage_options: Mapping[str, str] | None = None,
        schema: str | None = None,
    ) -> None:
        extras.require("delta")
        super().__init__("Delta table", path, schema)
        if isinstance(partition_by, str):
            raise InvalidArgument(f"partition_by cannot be {partition_by!r}", "Give a list of columns: ['day'].")
        self.name = f"Delta table {self.path}"
        self.path = self.path.replace("s3://", "s3a://", 1)  # the name that Hadoop has for it
        self._columns, self._storage = list(partition_by), dict(storage_options or {})

    @property
    def _uri(self) -> str:
        return self.path.replace("s3a://", "s3://", 1).removeprefix("file://")

    def _table(self) -> DeltaTable:
        from deltalake import DeltaTable

        return DeltaTable(self._uri, storage_options=self._storage)

    def shape(self, rows: StructType) -> Shape:
        from deltalake import DeltaTable
        from pyspark.sql.pandas.types import to_arrow_schema
        from pyspark.sql.types import StructField, StructType

        if not DeltaTable.is_deltatable(self._uri, storage_options=self._storage):
            missing = [name for name in self._columns if name not in rows.names]
            if missing:
                raise PipelineFailed(f"{self.name} cannot be partitioned by {missing[0]!r}: the rows do not have it")
            columns = StructType([StructField(field.name, field.dataType) for field in rows.fields])
            DeltaTable.create(
                self._uri,
                to_arrow_schema(columns, timezone="UTC"),
                mode="ignore",
                partition_by=self._columns or None,
                storage_options=self._storage,
            )
        table = self._table()
        settings = table.metadata().configuration
        checks = {key.removeprefix(_CHECK): value for key, value in settings.items() if key.startswith(_CHECK)}
        return Shape(StructType.fromJson(json.loads(table.schema().to_json())), checks)

    def last_claim(self, write: Write) -> int:
        return self._table().transaction_version(_application(write)) or 0

    def append(self, write: Write, chunks: Chunks) -> None:
        from deltalake import CommitProperties, Transaction, write_deltalake
        from pyspark.sql.pandas.types import to_arrow_schema
        from pyspark.sql.types import StructType

        table = self._table()
        if (table.transaction_version(_application(write)) or 0) >= write.claim:
            return
        columns = StructType.fromJson(json.loads(table.schema().to_json()))
        once = CommitProperties(app_transactions=[Transaction(_application(write), write.claim)])
        rows = chunks.reader(to_arrow_schema(columns, timezone="UTC"))
        write_deltalake(table, rows, mode="append", commit_properties=once)

    def passes(self, error: Exception) -> bool:
        from deltalake.exceptions import CommitFailedError

        return isinstance(error, CommitFailedError | OSError)


def _application(write: Write) -> str:
    return f"custody-{write.uid}"
