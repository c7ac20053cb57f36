"""Rows of done messages in an Iceberg table, each exactly once, by PyIceberg. Runs in the driver.

The summary of each snapshot names the pipeline and the claim. The last claim is a property of the table too, because
snapshots expire; both are in the commit that appends the rows. A commit that another one has overtaken is not repeated
before the claim was looked up again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from custody import extras
from custody.errors import InvalidArgument, PipelineFailed
from custody.spark.outside.lake import Chunks, Lake, Shape
from custody.spark.outside.sinks import Write

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog
    from pyiceberg.table import Table
    from pyspark.sql.types import StructType

CATALOG = "custody_iceberg"
"""The schema of the default catalogue in Custody's database."""


class Iceberg(Lake):
    """An Iceberg table, `namespace.table`. It is made if there is none.

    `warehouse` is a directory that the driver and all executors can reach: rows are staged there. Without `catalog` the
    tables are there too, and the catalogue is in Custody's database. `catalog` has the properties of another catalogue,
    as PyIceberg takes them (`name` is its name there). A new table has `_partition`, `_offset` and `_key` and the
    columns of the rows; in one that exists the first three may be missing.
    """

    def __init__(
        self, table: str, *, warehouse: str, catalog: Mapping[str, str] | None = None, schema: str | None = None
    ) -> None:
        extras.require("iceberg")
        if "." not in table.strip("."):
            raise InvalidArgument(f"the table cannot be {table!r}", "Give its namespace and name: 'shop.orders'.")
        self._warehouse = warehouse if "://" in warehouse else Path(warehouse).absolute().as_uri()
        super().__init__(f"Iceberg table {table}", f"{self._warehouse.rstrip('/')}/_custody/{table}", schema)
        self.path = self.path.replace("s3://", "s3a://", 1)  # the name that Hadoop has for it
        self.table, self._given, self._database = table, catalog, ""

    def begins(self, database: str) -> None:
        self._database = database

    @contextmanager
    def catalog(self, database: str | None = None) -> Iterator[Catalog]:
        """The catalogue of the table. The default one is in Custody's database: a pipeline says where that is."""
        from pyiceberg.catalog import load_catalog

        if self._given is not None:
            catalog = load_catalog(**{"name": "custody", **self._given})
        else:
            catalog = load_catalog(
                "custody", type="sql", uri=_in_schema(database or self._database), warehouse=self._warehouse
            )
        try:
            yield catalog
        finally:
            catalog.close()

    def shape(self, rows: StructType) -> Shape:
        from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
        from pyspark.sql.types import StructField, StructType

        columns = StructType([StructField(field.name, field.dataType) for field in rows.fields])
        with self.catalog() as catalog:
            if not catalog.table_exists(self.table):
                catalog.create_namespace_if_not_exists(self.table.rpartition(".")[0])
                catalog.create_table_if_not_exists(self.table, schema=to_arrow_schema(columns, timezone="UTC"))
            found = catalog.load_table(self.table).schema().as_arrow()
        return Shape(from_arrow_schema(found, prefer_timestamp_ntz=True), {})

    def last_claim(self, write: Write) -> int:
        with self.catalog() as catalog:
            return _last_claim(catalog.load_table(self.table), write)

    def append(self, write: Write, chunks: Chunks) -> None:
        import pyarrow as pa

        with self.catalog() as catalog:
            table = catalog.load_table(self.table)
            if _last_claim(table, write) >= write.claim:
                return
            schema = table.schema().as_arrow()
            # PyIceberg streams only into tables without partitions
            rows = pa.concat_tables(chunks.tables(schema)) if table.spec().fields else chunks.reader(schema)
            _do_not_repeat(table)
            with table.transaction() as transaction:
                transaction.append(
                    rows, snapshot_properties={"custody.pipeline": write.uid, "custody.claim": str(write.claim)}
                )
                transaction.set_properties({_property(write): str(write.claim)})

    def passes(self, error: Exception) -> bool:
        from pyiceberg.exceptions import CommitFailedException, ServerError, ServiceUnavailableError
        from sqlalchemy.exc import OperationalError

        passing = (CommitFailedException, ServerError, ServiceUnavailableError, OperationalError, OSError)
        return isinstance(error, passing)


def _last_claim(table: Table, write: Write) -> int:
    """By the property, or by the snapshots if somebody has removed it."""
    claims = [int(table.properties.get(_property(write), 0))]
    for snapshot in table.snapshots():
        summary = snapshot.summary
        if summary is not None and summary.get("custody.pipeline") == write.uid:
            claims.append(int(summary.get("custody.claim") or 0))
    return max(claims)


def _property(write: Write) -> str:
    return f"custody.claim.{write.uid}"


def _do_not_repeat(table: Table) -> None:
    """PyIceberg repeats a commit that another one has overtaken, which may be that of the same claim.

    The setting is that of this object alone: the catalogue applies changes to what it has itself.
    """
    settings = {**table.metadata.properties, "commit.retry.num-retries": "0"}
    table.metadata = table.metadata.model_copy(update={"properties": settings})


def _in_schema(database: str) -> str:
    """The address of the catalogue in Custody's database, whose schema is made if there is none."""
    import sqlalchemy as sa

    from custody.spark.outside.jdbc_table import address_of

    if not database:
        raise PipelineFailed(
            "the catalogue of an Iceberg table has no database", "Run the pipeline, or give a catalog."
        )
    url = address_of(database)
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    with engine.connect() as connection:
        if not sa.inspect(connection).has_schema(CATALOG):
            connection.execute(sa.schema.CreateSchema(CATALOG, if_not_exists=True))
            connection.commit()
    options = f"{url.query.get('options', '')} -csearch_path={CATALOG}".strip()
    return url.update_query_dict({"options": options}).render_as_string(hide_password=False)
