"""Roles of the database: which SQL functions and views the code of each calls, by the declarations of the verbs.

A verb says who may call it (`right=`), and its method names the SQL functions. Code that is no verb has its place in
PLACES. What the functions need in turn is read from their text (store/rights.py).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from importlib import resources
from typing import Literal, get_args

from custody.store.interfaces import earlier, interface
from custody.store.rights import Rights, catalog

Role = Literal["readonly", "producer", "app", "worker", "operator"]
ROLES: tuple[Role, ...] = get_args(Role)

RIGHTS: dict[Role, tuple[str, ...]] = {
    "readonly": (),
    "producer": ("any", "produce"),
    "app": ("any", "produce", "consume"),
    "worker": ("any", "produce", "consume", "run"),
    "operator": ("any", "produce", "consume", "run", "admin"),
}

# Code that calls SQL functions and is no verb of its own: a file, or one function of it. `run` is what pipelines and
# relays need beside the rights of consumers.
PLACES = {
    "coalesced/acks": "consume",
    "coalesced/claims": "admin",  # of a server only
    "coalesced/publishes": "produce",
    "engine/apikeys": "admin",
    "engine/base": "any",
    "engine/dead_letters": "admin",
    "engine/groups": "admin",
    "engine/operating": "consume",
    "engine/schedules": "admin",
    "engine/schedules._tick": "consume",  # every worker publishes ticks
    "engine/schedules.tick": "consume",
    "engine/server_verbs": "admin",
    "engine/surveying": "consume",
    "engine/topics": "any",
    "engine/topics._keep": "admin",
    "engine/transactions": "produce",
    "engine/transactions.open": "admin",
    "outbox/__init__": "produce",
    "outbox/operating": "admin",
    "outbox/to_topics": "run",
    "relay/claims": "run",
    "relay/loop": "run",
    "spark/database/arrow": "run",
    "spark/database/sinks": "run",
    "spark/database/states": "run",
    "spark/database/tasks": "run",
    "store/arrow": "run",
    "verbs/claim": "consume",
    "verbs/claim.skip": "admin",  # the outcome of that name; the function `skip` is for operators
    "verbs/delays": "produce",
    "verbs/log": "produce",
    "verbs/log.offset_at": "consume",
    "verbs/log.read": "consume",
    "verbs/pipelines": "run",
    "verbs/pipelines.figures": "consume",
    "verbs/pipelines.states": "consume",
    "verbs/settle": "consume",
    "verbs/upkeep": "admin",
}

# For users of SQL: no code of ours calls them.
SQL_ONLY = {"drop_segments": "admin", "outbox_write": "produce", "seal_segment": "admin", "send": "produce"}

SECRET = frozenset({"api_keys", "granted"})
"""Tables that nobody reads who is not an operator."""
LEDGER = ("migrations", "release")
"""Tables that everybody reads who opens the database."""


@cache
def entries() -> dict[str, frozenset[str]]:
    """The SQL functions and views that code names, by the right that it needs."""
    found: dict[str, set[str]] = {}
    for name, right in (*_called(), *SQL_ONLY.items()):
        found.setdefault(right, set()).add(name)
    known = catalog().texts.keys() | catalog().views
    for release in earlier():  # code of these may still run
        for name, form in interface(release).items():
            for right in form.rights if name in known else ():
                found.setdefault(right, set()).add(name)
    return {right: frozenset(names) for right, names in found.items()}


@cache
def rights_of(role: Role) -> Rights:
    """What a role of the database needs, and no more."""
    known = catalog()
    if role == "readonly":
        found = _reading()
    else:
        names = {name for right in RIGHTS[role] for name in entries().get(right, ())}
        if role == "producer":  # the commit of a transaction may settle a lease
            names = {name for name in names if "UPDATE" not in known.needed([name]).relations.get("leases", ())}
        found = known.needed(names)
    for table in LEDGER:
        found.add(table, "SELECT")
    if role == "operator":
        found.merge(_reading())
    return found


def _reading() -> Rights:
    """All that only reads."""
    known = catalog()
    found = Rights()
    for name in (*known.texts, *known.views):
        needed = known.needed([name])
        if needed.reads_only and not SECRET & needed.relations.keys() and not known.definers & needed.functions:
            found.merge(needed)
    for table in (known.tables - SECRET) | known.views:
        found.add(table, "SELECT")
    return found


def _called() -> Iterator[tuple[str, str]]:
    """Each SQL function or view that a call of the code names, and the right of that code."""
    known = catalog()
    names = known.texts.keys() | known.views
    for file in sorted({place.partition(".")[0] for place in PLACES} | _engine()):
        code = ast.parse(resources.files("custody").joinpath(f"{file}.py").read_text(encoding="utf-8"))
        for function in ast.walk(code):
            if not isinstance(function, ast.FunctionDef):
                continue
            right = _declared(function) or PLACES.get(f"{file}.{function.name}") or PLACES.get(file)
            for name in _named(function) & names:
                if right is None:
                    raise LookupError(f"{file}.py, {function.name}: no right is known for custody.{name}")
                yield name, right


def _engine() -> set[str]:
    engine = resources.files("custody").joinpath("engine")
    return {f"engine/{one.name[:-3]}" for one in engine.iterdir() if one.name.endswith(".py")}


def _declared(function: ast.FunctionDef) -> str | None:
    """The right that the verb of a method declares."""
    for one in function.decorator_list:
        if isinstance(one, ast.Call) and isinstance(one.func, ast.Name) and one.func.id == "verb":
            return str(next(ast.literal_eval(keyword.value) for keyword in one.keywords if keyword.arg == "right"))
    return None


def _named(function: ast.FunctionDef) -> set[str]:
    """The texts that the function gives to calls, and the names in its statements."""
    calls = [one for statement in function.body for one in ast.walk(statement) if isinstance(one, ast.Call)]
    given = [text for call in calls for text in call.args]
    texts = [text.value for text in given if isinstance(text, ast.Constant) and isinstance(text.value, str)]
    spoken = [word.partition("(")[0] for text in texts for word in text.split("custody.")[1:]]
    return {*texts, *spoken}
