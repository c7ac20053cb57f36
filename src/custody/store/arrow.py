"""Statements for reading into Arrow.

The ADBC driver uses COPY only for a statement without parameters, so the values are in its text, as literals that
psycopg quotes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from psycopg import sql

from custody.errors import InvalidArgument
from custody.store.postgres import translated

Condition = tuple[str, str, Any]
"""A column, an operator of OPERATORS, and a value (a sequence for "in", ignored for "is null")."""

OPERATORS = ("=", "<", "<=", ">", ">=", "in", "is null", "is not null")

_SOURCE = re.compile(r"custody\.(log_\d+|kept_events) WHERE (topic_id = \d+ AND )?partition = \d+")
_ONE_RANGE = re.compile(r"\{\[(\d+),(\d+)\)\}")
_COLUMNS = sql.SQL('partition, "offset", published_at, key, kind::text AS kind, payload, headers::text AS headers')
_OFFSET = sql.SQL('"offset"')
# the driver does not know these types, or maps them to a type of its own
_AS_TEXT = frozenset({"offsets", "detail", "headers", "lease_id"})


def select_events(
    source: str,
    ranges: str,
    conditions: Sequence[Condition] = (),
    share: tuple[int, int] | None = None,
    *,
    offsets_only: bool = False,
) -> str:
    """Selects the events of a source (as `custody.segments_over` returns it) in a multirange of offsets, by offset.

    `share` (k, m) is the k-th of m parts, starting at 0. All messages of a key are in the same part.
    """
    if not _SOURCE.fullmatch(source):
        raise InvalidArgument(f"{source!r} is not a table of the log")
    columns = _OFFSET if offsets_only else _COLUMNS
    table = sql.SQL(source)  # checked above
    where = [_condition(*condition) for condition in conditions]
    if share is not None:
        # the remainder first, because the smallest bigint has no absolute value
        part = sql.SQL('abs(hashtextextended(coalesce(key, "offset"::text), 0) % {}) = {}')
        where.append(part.format(sql.Literal(share[1]), sql.Literal(share[0])))
    more = sql.SQL("").join(sql.SQL(" AND {}").format(condition) for condition in where)
    one = _ONE_RANGE.fullmatch(ranges)
    if one is not None:
        plain = sql.SQL('SELECT {} FROM {} AND "offset" >= {} AND "offset" < {}{} ORDER BY "offset"')
        return _text(plain.format(columns, table, sql.Literal(int(one[1])), sql.Literal(int(one[2])), more))
    # ORDER BY prevents the planner from flattening the lateral into a join, which would scan the whole table
    lateral = sql.SQL(
        "SELECT e.* FROM unnest({}::int8multirange) r, "
        'LATERAL (SELECT {} FROM {} AND "offset" >= lower(r) AND "offset" < upper(r){} ORDER BY "offset") e'
    )
    return _text(lateral.format(sql.Literal(ranges), columns, table, more))


def select_view(view: str, columns: Sequence[str], conditions: Sequence[Condition] = ()) -> str:
    """Selects columns of one of Custody's views."""
    return _text(
        sql.SQL("SELECT {} FROM {} WHERE {}").format(
            sql.SQL(", ").join(_column(name) for name in columns),
            sql.Identifier("custody", view),
            sql.SQL(" AND ").join([sql.SQL("true"), *(_condition(*condition) for condition in conditions)]),
        )
    )


def _column(name: str) -> sql.Composable:
    column = sql.Identifier(name)
    return sql.SQL("{}::text AS {}").format(column, column) if name in _AS_TEXT else column


def _condition(column: str, operator: str, value: Any) -> sql.Composable:
    if operator not in OPERATORS:
        raise InvalidArgument(f"{operator!r} is not an operator", f"Use one of: {', '.join(OPERATORS)}.")
    parts: list[sql.Composable] = [sql.Identifier(column), sql.SQL(operator)]
    if operator == "in":
        parts.append(sql.SQL("({})").format(sql.SQL(", ").join(map(sql.Literal, value)) if value else sql.SQL("NULL")))
    elif not operator.startswith("is"):
        parts.append(sql.Literal(value))
    return sql.SQL(" ").join(parts)


def _text(statement: sql.Composed) -> str:
    with translated():
        return statement.as_string(None)
