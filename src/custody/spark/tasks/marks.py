"""Marks rows of a batch as failed or as not needed: the functions `fail` and `skip`, and the column that they set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from custody.model.outcomes import Kind
from custody.model.policy import Duration, seconds_or_none
from custody.spark.causes import WrongResult
from custody.spark.expectations import UNMET, On
from custody.spark.expectations import reason as reason_of

OUTCOME: Final = "_outcome"
_MARK = pa.struct([("outcome", pa.string()), ("error", pa.string()), ("delay", pa.float64())])
_KINDS = ("nack", "dead", "later", "skip")

Rows = TypeVar("Rows")
"""A RecordBatch or Table of Arrow, or a DataFrame of pandas."""


def fail(rows: Rows, mask: Any, reason: Any, *, dead: bool = False, retry_after: Duration | None = None) -> Rows:
    """Marks the messages of these rows as failed, each with its reason, and returns the rows with the mark.

    `mask` is an array or a Series of booleans, in which null is false; `reason` a text, or one for each row. With
    `dead` a message is dead at once; `retry_after` replaces the policy's backoff. The first mark of a row counts.
    """
    return _marked(rows, mask, "dead" if dead else "nack", reason, seconds_or_none(retry_after))


def skip(rows: Rows, mask: Any, reason: Any) -> Rows:
    """Marks the messages of these rows as not needed: they count as done and publish nothing."""
    return _marked(rows, mask, "skip", reason, None)


def expecting_rows(name: str, mask: Any, on: On) -> Callable[[Rows], Rows]:
    """What `expect` returns for a mask: adds the name to the column `_unmet` of the rows that do not meet it."""

    def mark(rows: Rows) -> Rows:
        table = table_of(rows, "the rows to mark are")
        unmet = ~mask_of(mask, table.num_rows)
        if not unmet.any():
            return rows
        names = unmet_of(table)
        column = [[*had, name] if missed else had for had, missed in zip(names, unmet.tolist(), strict=True)]
        rows = _with(rows, UNMET, column, pa.list_(pa.string()))
        return rows if on == "warn" else fail(rows, unmet, reason_of(name), dead=on == "dead")

    return mark


def unmet_of(table: pa.Table) -> list[list[str]]:
    """The expectations that each row does not meet."""
    if UNMET not in table.column_names:
        return [[]] * table.num_rows
    return [[] if names is None else list(names) for names in table.column(UNMET).to_pylist()]


def is_pandas(rows: object) -> bool:
    """Whether it is a DataFrame of pandas. Imports nothing."""
    return type(rows).__module__.partition(".")[0] == "pandas" and type(rows).__name__ == "DataFrame"


def table_of(rows: object, what: str) -> pa.Table:
    """The rows as a table of Arrow."""
    if isinstance(rows, pa.Table):
        return rows
    if isinstance(rows, pa.RecordBatch):
        return pa.Table.from_batches([rows])
    if is_pandas(rows):
        return _of_pandas(rows)
    raise WrongResult(
        f"{what} a {type(rows).__name__}, which is no RecordBatch or Table of Arrow, and no DataFrame of pandas"
    )


def _of_pandas(rows: Any) -> pa.Table:
    table = pa.Table.from_pandas(rows, preserve_index=False)
    if "_headers" in table.column_names:  # dicts, of which Arrow would make a struct with the names of all of them
        pairs = [list(one.items()) if isinstance(one, dict) else None for one in rows["_headers"]]
        number = table.column_names.index("_headers")
        table = table.set_column(number, "_headers", pa.array(pairs, pa.map_(pa.string(), pa.string())))
    return table


def marks_of(table: pa.Table) -> list[dict[str, Any] | None]:
    """The mark of each row: a struct of outcome, error and delay (seconds), or only the outcome; None for none."""
    column = table.column(OUTCOME)
    if pa.types.is_null(column.type):
        return [None] * table.num_rows
    marks = [{"outcome": mark} if isinstance(mark, str) else mark for mark in column.to_pylist()]
    for mark in marks:
        if mark is None:
            continue
        kind = mark.get("outcome") if isinstance(mark, dict) else mark
        if kind not in _KINDS:
            raise WrongResult(
                f"the handler returned the {OUTCOME} {kind!r}; it is null, or one of {', '.join(_KINDS)}, "
                "or a struct of outcome, error and delay"
            )
        if mark["outcome"] == "later" and mark.get("delay") is None:
            raise WrongResult(f"the handler returned the {OUTCOME} 'later' without a delay (seconds)")
    return marks


def mask_of(mask: Any, count: int) -> np.ndarray:
    """The mask as an array of booleans, in which null is false."""
    if isinstance(mask, pa.ChunkedArray):
        mask = mask.combine_chunks()
    if isinstance(mask, pa.Array):
        found = pc.fill_null(mask, False).to_numpy(zero_copy_only=False)
    elif hasattr(mask, "fillna"):  # a Series of pandas
        found = mask.fillna(False).to_numpy()
    else:
        found = np.asarray(mask)
    found = np.asarray(found, dtype=bool)
    if found.shape != (count,):
        raise WrongResult(f"a mask has {found.size} values for {count} rows: it needs one for each row")
    return found


def _marked(rows: Rows, mask: Any, kind: Kind, reason: Any, delay: float | None) -> Rows:
    table = table_of(rows, "the rows to mark are")
    chosen = mask_of(mask, table.num_rows)
    none: list[dict[str, Any] | None] = [None] * table.num_rows
    marks = marks_of(table) if OUTCOME in table.column_names else none
    if not isinstance(reason, str):
        reason = reason.to_pylist() if isinstance(reason, pa.Array | pa.ChunkedArray) else list(reason)
        if len(reason) != table.num_rows:
            raise WrongResult(f"{len(reason)} reasons for {table.num_rows} rows: give a text, or one for each row")
    for row in np.flatnonzero(chosen).tolist():
        if marks[row] is None:
            text = reason if isinstance(reason, str) else reason[row]
            marks[row] = {"outcome": kind, "error": None if text is None else str(text), "delay": delay}
    return _with(rows, OUTCOME, marks, _MARK)


def _with(rows: Rows, name: str, values: list[Any], kind: pa.DataType) -> Rows:
    """The rows with this column, added or replaced."""
    changed = cast("Any", rows)
    if is_pandas(rows):
        return cast("Rows", changed.assign(**{name: values}))
    names, column = changed.schema.names, pa.array(values, kind)
    if name in names:
        return cast("Rows", changed.set_column(names.index(name), name, column))
    return cast("Rows", changed.append_column(name, column))
