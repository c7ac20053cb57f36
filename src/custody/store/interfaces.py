"""What the code of a release calls: its SQL functions with parameters and columns, and views, as sql/interfaces has it.

Code calls a schema that is one release older by that file: it leaves out what the older functions do not know. A newer
schema answers all that the file of an older release has; `unanswered` says what it does not.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from functools import cache
from importlib import resources
from typing import Any, NamedTuple, cast

import psycopg
from psycopg import sql

from custody.errors import SchemaOlder
from custody.store.functions import OLDEST, RELEASE, present, read_script

REMEDY = "Run `custody migrate`."

Typed = tuple[tuple[str, str], ...]
"""Names with their types."""


class Form(NamedTuple):
    """How a function is called, or a view is read (`parameters` is None)."""

    parameters: Typed | None
    required: int
    columns: Typed
    rights: tuple[str, ...]


@cache
def interface(release: int) -> Mapping[str, Form]:
    """What the code of an earlier release calls."""
    text = resources.files("custody.store").joinpath("sql", "interfaces", f"{release}.json").read_text("utf-8")
    return {
        name: Form(
            parameters=None if one["parameters"] is None else _typed(one["parameters"]),
            required=one["required"] or 0,
            columns=_typed(one["columns"]),
            rights=tuple(one["rights"]),
        )
        for name, one in json.loads(text).items()
    }


def _typed(pairs: Any) -> Typed:
    return tuple((name, kind) for name, kind in pairs)


def earlier() -> range:
    """The earlier releases whose code works with this schema."""
    return range(OLDEST, RELEASE)


def described(connection: psycopg.Connection[Any], rights: Mapping[str, Collection[str]]) -> str:
    """The file for this release: `rights` has the functions and views that its code calls, by the right it needs."""
    names = sorted({name for some in rights.values() for name in some})
    rows = connection.execute(read_script("interface.sql"), {"names": names}).fetchall()
    lines = {
        name: {
            "parameters": parameters,
            "required": required,
            "columns": columns,
            "rights": sorted(right for right, some in rights.items() if name in some),
        }
        for name, parameters, required, columns in rows
        if parameters is None or _is_present(name, parameters)
    }
    return "{\n" + ",\n".join(f"{json.dumps(name)}: {json.dumps(one)}" for name, one in lines.items()) + "\n}\n"


def _is_present(name: str, parameters: list[tuple[str, str]]) -> bool:
    """Whether it is the form of this release, and not one for code of an earlier release."""
    signature = present().get(name)
    return signature is not None and signature[0] == tuple(one.removeprefix("p_") for one, _ in parameters)


def known_to(release: int, function: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call that a schema of an earlier release knows. Refuses what is new and was given."""
    form = interface(release).get(function)
    if form is None or form.parameters is None:
        raise SchemaOlder(f"the database is at release {release}, which has no function {function}", REMEDY)
    names = {name.removeprefix("p_") for name, _ in form.parameters}
    new = sorted(name for name, value in arguments.items() if name not in names and value is not None)
    if new:
        what = ", ".join(new)
        raise SchemaOlder(f"the database is at release {release}, where {function} does not know {what}", REMEDY)
    return {name: value for name, value in arguments.items() if name in names}


def unanswered(connection: psycopg.Connection[Any], release: int) -> list[str]:
    """The calls of an earlier release's code that this database does not answer as that release did. The connection is
    in autocommit mode. No function is run."""
    found = []
    for name, form in interface(release).items():
        for statement in _calls(name, form):
            try:
                cursor = connection.execute(statement)
            except psycopg.Error as error:
                found.append(f"{name}: {error.diag.message_primary}")
                continue
            kinds = [column.type_code for column in cursor.description or ()]
            query = "SELECT array_agg(format_type(t, NULL) ORDER BY n) FROM unnest(%s::oid[]) WITH ORDINALITY x (t, n)"
            (types,) = cast("Any", connection.execute(query, [kinds]).fetchone())
            if types != [kind for _, kind in form.columns]:
                found.append(f"{name}: its columns are {', '.join(types)}")
    return sorted(set(found))


def _calls(name: str, form: Form) -> list[sql.Composed]:
    """A read of the columns of a view, or the calls of a function with all parameters and with the required ones."""
    columns = sql.SQL(", ").join(sql.Identifier(column) for column, _ in form.columns)
    place = sql.Identifier("custody", name)
    select = sql.SQL("SELECT {} FROM {} AS x WHERE false")
    if form.parameters is None:
        return [select.format(columns, place)]
    given = [
        sql.SQL("{} => NULL::{}").format(sql.Identifier(parameter), sql.SQL(cast("Any", kind)))
        for parameter, kind in form.parameters
    ]
    if len(form.columns) == 1 and form.columns[0][0] == name:
        columns = sql.Composed([sql.SQL("x")])  # one value
    return [
        select.format(columns, sql.SQL("{}({})").format(place, sql.SQL(", ").join(given[:count])))
        for count in {len(given), form.required}
    ]
