"""Rows of done messages in a table of a relational database, each exactly once.

Before the commit the rows are staged in the table's own database, and then inserted in a transaction that stays open:
the table accepts them, or names those that it refuses. The commit in Custody decides. After it the transaction is
committed; if it was lost with its driver, the next one inserts what is staged. The transaction also records the claim,
so a repetition inserts nothing. Runs in the driver.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from custody import extras
from custody.errors import DatabaseUnavailable, InvalidArgument, PipelineFailed
from custody.model.outcomes import Outcome
from custody.spark.outside.sinks import Outside, RowsRefused, SinkDown, Write, already
from custody.verbs.pipelines import BatchReport

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from custody.spark.outside.jdbc_table import JdbcTable

logger = logging.getLogger(__name__)

Mode = Literal["append", "upsert"]
Place = tuple[int, int]

REFUSED = 256
"""Most messages of one write that are found to be refused. Those that are not tried by then are released."""


class _Open(NamedTuple):
    """A transaction with the rows of a write, which waits for the commit in Custody."""

    claim: int
    token: str
    table: JdbcTable


class Jdbc(Outside):
    """A table of a relational database. `append` adds a row for each result; `upsert` changes the row with the same
    `key`, or adds one.

    The columns of the rows have to be columns of the table. `_partition`, `_offset` and `_key` are left out if the
    table does not have them.
    """

    shows = True

    def __init__(
        self, url: str, table: str, mode: Mode = "append", *, key: str | Sequence[str] = (), schema: str | None = None
    ) -> None:
        if not isinstance(url, str):
            raise InvalidArgument("a table needs the URL of its database", "For example postgresql://host/shop.")
        if not table:
            raise InvalidArgument(f"the table cannot be {table!r}", "Give its name: 'orders', or 'shop.orders'.")
        if mode not in ("append", "upsert"):
            raise InvalidArgument(f"mode cannot be {mode!r}", "It is 'append' or 'upsert'.")
        keys = [key] if isinstance(key, str) else list(key)
        if (mode == "upsert") != bool(keys):
            raise InvalidArgument(
                f"mode={mode!r} with key={keys!r}", "An upsert needs key=['column', …], and nothing else takes one."
            )
        extras.require("jdbc")
        from custody.spark.outside.jdbc_table import address_of

        try:
            self._url = address_of(url)
        except Exception:
            # the error of SQLAlchemy has the whole URL, with its password
            raise InvalidArgument("the URL of the table is invalid", "For example postgresql://host/shop.") from None
        backend = self._url.get_backend_name()
        if keys and backend not in ("postgresql", "sqlite", "mysql", "mariadb"):
            raise InvalidArgument(f"there is no upsert for {backend}", "Use mode='append', or @pipeline.write.")
        self.table, self.schema, self._key = table, schema, keys
        self.name = f"table {table} of {backend} database {self._url.database or ''} on {self._url.host or 'this host'}"
        self._holds = backend != "sqlite"
        """SQLite has one writer, so nothing stays open there: what was tried is rolled back, and inserted again."""
        self._open: dict[str, _Open] = {}

    def __repr__(self) -> str:
        return f"<Jdbc {self.name}>"

    def _connect(self) -> JdbcTable:
        from custody.spark.outside.jdbc_table import JdbcTable

        table = JdbcTable(self._url, self.table, self._key)
        try:
            table.prepare()
        except BaseException:
            table.close()
            raise
        return table

    def stage(self, rows: DataFrame, write: Write) -> None:
        from custody.spark.outside.packed_rows import packed

        self.abandon(write.uid)
        names = rows.columns
        if self._key:  # the last one counts
            rows = rows.orderBy("_partition", "_offset")
        table = self._connect()
        try:
            columns = table.columns_for(names)
            for part, content in enumerate(packed(rows)):
                table.add(write, part, content)
            table.commit()
            report = BatchReport()
            if not table.record(write):
                raise already(self.name, write)
            for content in table.parts(write):
                _place(table, columns, content, report)
            if report.failed:
                table.rollback()
                raise RowsRefused(report)
            if self._holds:
                self._open[write.uid] = _Open(write.claim, write.token, table)
            else:
                table.rollback()
        finally:
            if write.uid not in self._open:
                table.close()

    def show(self, _spark: SparkSession, write: Write) -> None:
        from custody.spark.outside.jdbc_table import WrongRows
        from custody.spark.outside.packed_rows import unpacked

        held = self._open.pop(write.uid, None)
        try:
            if held is not None and held[:2] == (write.claim, write.token):
                try:
                    held.table.commit()
                    return
                except (SinkDown, WrongRows, PipelineFailed):
                    logger.debug("%s: claim %s is inserted again, unless it was committed", self.name, write.claim)
            table = self._connect()
            try:
                if not table.record(write):
                    return
                columns: list[str] = []
                report = BatchReport()
                for content in table.parts(write):
                    columns = columns or table.columns_for(unpacked(content).column_names)
                    _place(table, columns, content, report)
                if report.failed:
                    (place, outcome), *_ = report.failed.items()
                    raise PipelineFailed(
                        f"claim {write.claim} is committed, but {self.name} refuses rows of it that it took before: "
                        f"partition {place[0]}, offset {place[1]}: {outcome.error}",
                        "Make the table accept them and start the pipeline again: the rows are staged, not lost.",
                    )
                table.commit()
            finally:
                table.close()
        except SinkDown as down:
            raise _unavailable(self.name, down) from down
        finally:
            if held is not None:
                held.table.close()

    def clear(self, _spark: SparkSession, write: Write) -> None:
        try:
            table = self._connect()
            try:
                table.remove(write)
                table.commit()
            finally:
                table.close()
        except SinkDown as down:
            raise _unavailable(self.name, down) from down

    def abandon(self, uid: str) -> None:
        held = self._open.pop(uid, None)
        if held is not None:
            held.table.close()


def _unavailable(name: str, down: SinkDown) -> DatabaseUnavailable:
    return DatabaseUnavailable(f"{name}: {down}", "The rows are staged; the pipeline waits for the database.")


def _place(table: JdbcTable, columns: list[str], content: bytes, report: BatchReport) -> None:
    """Inserts a batch of rows. Those that the table refuses are found by halves, message by message."""
    messages = _messages(columns, content)
    parts = [list(messages)] if messages else []
    while parts:
        part = parts.pop()
        if len(report.failed) >= REFUSED:
            for partition, offset in part:
                report.left.setdefault(partition, []).append(offset)
            continue
        error = _refusal(table, columns, [row for place in part for row in messages[place]])
        if error is None:
            continue
        if len(part) == 1:
            report.failed[part[0]] = Outcome("nack", error=f"table {table.name}: {error}")
        else:
            half = len(part) // 2
            parts += [part[half:], part[:half]]


def _refusal(table: JdbcTable, columns: list[str], rows: list[tuple[Any, ...]]) -> str | None:
    from custody.spark.outside.jdbc_table import WrongRows

    try:
        table.insert(columns, rows)
    except WrongRows as wrong:
        return str(wrong)
    return None


def _messages(columns: list[str], content: bytes) -> dict[Place, list[tuple[Any, ...]]]:
    """The rows of each message, in their order."""
    from custody.spark.outside.packed_rows import unpacked

    rows = unpacked(content)
    found: dict[Place, list[tuple[Any, ...]]] = {}
    places = zip(rows["_partition"].to_pylist(), rows["_offset"].to_pylist(), strict=True)
    for place, row in zip(places, _values(rows, columns), strict=True):
        found.setdefault(place, []).append(row)
    return found


def _values(rows: Any, columns: list[str]) -> Iterator[tuple[Any, ...]]:
    if not columns:
        return iter([()] * len(rows))
    return zip(*(rows[name].to_pylist() for name in columns), strict=True)
