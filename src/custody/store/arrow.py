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

_SOURCE = re.compile(r"custody\.(log_\d+|kept_events) WHERE (topic_id = \d+ AND )?partition = \d+( AND n = 1)?")
_ONE_RANGE = re.compile(r"\{\[(\d+),(\d+)\)\}")
_PLAIN = sql.SQL('partition, "offset", published_at, key, kind::text AS kind, payload, headers::text AS headers')
_OFFSET = sql.SQL('"offset"')
_WHOLE = sql.SQL(
    'l.partition, l."offset" - l.n + 1 AS "offset", l.published_at, l.key, coalesce(l.kinds, l.kind::text) AS kind, '
    "coalesce(l.payloads, l.payload) AS payload, l.headers::text AS headers, l.ends, l.keys, "
    "l.headers_each::text[] AS headers_each"
)
# the remainder first, because the smallest bigint has no absolute value
_SHARE = sql.SQL('abs(hashtextextended(coalesce({0}.key, {0}."offset"::text), 0) % {1}) = {2}')
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
    if source.endswith(" AND n = 1") or "kept_events" in source:
        return _text(_select_plain(sql.SQL(source), ranges, conditions, share, _OFFSET if offsets_only else _PLAIN))
    if offsets_only:
        return _text(_select_offsets(source, ranges, conditions, share))
    if conditions or share is not None:
        return _text(_select_some(source, ranges, conditions, share))
    return _text(_rows(source, ranges, _WHOLE))


def _select_plain(
    table: sql.SQL, ranges: str, conditions: Sequence[Condition], share: tuple[int, int] | None, columns: sql.SQL
) -> sql.Composed:
    """Of a table whose rows are messages."""
    more = sql.SQL("").join(sql.SQL(" AND {}").format(one) for one in _wanted(conditions, share, "e", "e"))
    one = _ONE_RANGE.fullmatch(ranges)
    name, _, where = table.as_string(None).removesuffix(" AND n = 1").partition(" WHERE ")
    source = sql.SQL("{} e WHERE {}").format(sql.SQL(name), sql.SQL(where))
    if one is not None:
        plain = sql.SQL('SELECT {} FROM {} AND "offset" >= {} AND "offset" < {}{} ORDER BY "offset"')
        return plain.format(columns, source, sql.Literal(int(one[1])), sql.Literal(int(one[2])), more)
    # ORDER BY prevents the planner from flattening the lateral into a join, which would scan the whole table
    lateral = sql.SQL(
        "SELECT e.* FROM unnest({}::int8multirange) r, "
        'LATERAL (SELECT {} FROM {} AND "offset" >= lower(r) AND "offset" < upper(r){} ORDER BY "offset") e'
    )
    return lateral.format(sql.Literal(ranges), columns, source, more)


def _rows(source: str, ranges: str, columns: sql.Composable) -> sql.Composed:
    """The rows that overlap the ranges. A row that overlaps two is read with the first one."""
    table, _, where = source.partition(" WHERE ")
    return sql.SQL(
        "SELECT l.* FROM (SELECT lower(x) AS first, upper(x) AS until, lag(upper(x), 1, 0::bigint) OVER () AS before "
        "FROM unnest({ranges}::int8multirange) x) r, LATERAL (SELECT {columns} FROM {table} l WHERE l.{where} "
        'AND l."offset" >= r.first AND l."offset" - l.n + 1 >= r.before AND l."offset" <= coalesce('
        '(SELECT x."offset" FROM {table} x WHERE x.{where} AND x."offset" >= r.until - 1 ORDER BY x."offset" LIMIT 1), '
        'r.until) ORDER BY l."offset") l'
    ).format(ranges=sql.Literal(ranges), columns=columns, table=sql.SQL(table), where=sql.SQL(where))


def _select_some(
    source: str, ranges: str, conditions: Sequence[Condition], share: tuple[int, int] | None
) -> sql.Composed:
    """Of each batch the messages that are wanted, as a batch: `ends` has their lengths, `taken` their numbers."""
    by_key = next(
        (
            list(dict.fromkeys(value)) if operator == "in" else [value]
            for column, operator, value in conditions
            if column == "key" and operator in ("=", "in")
        ),
        None,
    )
    if by_key is not None and len(by_key) <= 20:
        # found without looking at each message
        numbers = sql.SQL(" || ").join(
            [sql.SQL("'{{}}'::int[]").format()]
            + [sql.SQL("array_positions(l.keys, {})").format(sql.Literal(key)) for key in by_key]
        )
        messages = sql.SQL(
            'SELECT i, b."offset" - b.n + i AS "offset", b.keys[i] AS key, coalesce(b.ends[i - 1], 0) AS start, '
            "b.ends[i] AS stop FROM unnest(b.numbers) i ORDER BY i"
        )
    else:
        numbers = sql.SQL("CASE WHEN l.n > 1 THEN '{{0}}'::int[] END").format()
        messages = sql.SQL(
            'SELECT u.i, b."offset" - b.n + u.i AS "offset", u.key, coalesce(b.ends[u.i - 1], 0) AS start, '
            "b.ends[u.i] AS stop FROM (SELECT generate_series(1, b.n) AS i, unnest(b.keys) AS key) u"
        )
    return sql.SQL(
        'SELECT b.partition, b."offset" - b.n + 1 AS "offset", b.published_at, b.key, '
        "CASE WHEN b.n = 1 THEN b.kind::text ELSE t.kinds END AS kind, "
        "CASE WHEN b.n = 1 THEN b.payload ELSE t.payload END AS payload, b.headers::text AS headers, "
        "t.lengths AS ends, t.keys, t.headers_each, t.taken "
        'FROM (SELECT l.partition, l."offset", l.n, l.published_at, l.key, l.kind, l.kinds, l.payload, l.headers, '
        "l.headers_each, l.numbers, l.ends || '{{}}' AS ends, "
        "CASE WHEN l.keys IS NOT NULL THEN l.keys || '{{}}' END AS keys, "
        "CASE WHEN cardinality(l.numbers) * 8 < l.n AND l.numbers <> '{{0}}' THEN l.payloads "
        "ELSE substring(l.payloads FROM 1) END AS payloads "
        "FROM (SELECT l.*, {numbers} AS numbers FROM ({rows}) l OFFSET 0) l "
        "WHERE l.n = 1 OR l.numbers <> '{{}}' OFFSET 0) b "
        "LEFT JOIN LATERAL (SELECT array_agg(m.key) AS keys, array_agg(m.stop - m.start) AS lengths, "
        "string_agg(substring(b.payloads FROM m.start + 1 FOR m.stop - m.start), '') AS payload, "
        "array_agg(m.i::int) AS taken, CASE WHEN b.kinds IS NULL THEN b.kind::text "
        "ELSE string_agg(substr(b.kinds, m.i::int, 1), '') END AS kinds, "
        "CASE WHEN b.headers_each IS NOT NULL THEN array_agg(b.headers_each[m.i]::text) END AS headers_each "
        "FROM ({messages}) m WHERE {batches}) t ON b.n > 1 "
        "WHERE CASE WHEN b.n = 1 THEN {singles} ELSE t.taken IS NOT NULL END"
    ).format(
        numbers=numbers,
        rows=_rows(source, ranges, sql.SQL("l.*")),
        messages=messages,
        batches=sql.SQL(" AND ").join(_wanted(conditions, share, "b", "m")),
        singles=sql.SQL(" AND ").join(_wanted(conditions, share, "b", "b")),
    )


def _select_offsets(
    source: str, ranges: str, conditions: Sequence[Condition], share: tuple[int, int] | None
) -> sql.Composed:
    columns = sql.SQL('l.partition, l."offset", l.n, l.published_at, l.key, l.keys')
    return sql.SQL(
        'SELECT m."offset" FROM ({rows}) b, LATERAL (SELECT b."offset" - b.n + u.i AS "offset", u.key '
        "FROM unnest(CASE WHEN b.keys IS NULL THEN array_fill(b.key, ARRAY[b.n]) ELSE b.keys END) "
        'WITH ORDINALITY u (key, i)) m WHERE {ranges}::int8multirange @> m."offset" AND {wanted}'
    ).format(
        rows=_rows(source, ranges, columns),
        ranges=sql.Literal(ranges),
        wanted=sql.SQL(" AND ").join([sql.SQL("true"), *_wanted(conditions, share, "b", "m")]),
    )


def _wanted(
    conditions: Sequence[Condition], share: tuple[int, int] | None, row: str, message: str
) -> list[sql.Composable]:
    """The conditions on a message, whose offset and key may be in another relation than the rest of its row."""
    found = [_condition(*one, message if one[0] in ("offset", "key") else row) for one in conditions]
    if share is not None:
        found.append(_SHARE.format(sql.Identifier(message), sql.Literal(share[1]), sql.Literal(share[0])))
    return found


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


def _condition(column: str, operator: str, value: Any, alias: str | None = None) -> sql.Composable:
    if operator not in OPERATORS:
        raise InvalidArgument(f"{operator!r} is not an operator", f"Use one of: {', '.join(OPERATORS)}.")
    parts: list[sql.Composable] = [sql.Identifier(*filter(None, (alias, column))), sql.SQL(operator)]
    if operator == "in":
        parts.append(sql.SQL("({})").format(sql.SQL(", ").join(map(sql.Literal, value)) if value else sql.SQL("NULL")))
    elif not operator.startswith("is"):
        parts.append(sql.Literal(value))
    return sql.SQL(" ").join(parts)


def _text(statement: sql.Composed) -> str:
    with translated():
        return statement.as_string(None)
