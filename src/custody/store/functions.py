"""The tables, SQL functions and views: the files that they are made of, and the parameters and columns of functions."""

from __future__ import annotations

import hashlib
import re
from functools import cache
from importlib import resources
from typing import LiteralString

RELEASE = 1
"""Raised by each release that changes a file of FUNCTIONS, so that older code knows that the database is newer."""
OLDEST = 1
"""The oldest release that works beside this one: its code with this schema, and this code with its schema."""

# In this order: a table refers to earlier ones.
SCHEMA = (
    "ledger", "log", "producers", "groups", "leases", "journal", "pipelines", "key_states", "api_keys", "schedules",
)  # fmt: skip
OUTBOX = "outbox"
"""The part of the schema, and the prefix of the migrations, that a standalone outbox has too."""

# In this order: a type or a view needs what it is made of.
FUNCTIONS = (
    "base/refuse", "base/guard", "base/guards", "base/ranges",
    "log/slices", "log/topics", "log/priorities", "log/read", "log/bulk_reads",
    "insights/stats",
    "log/delays", "log/append", "log/publish", "log/producers",
    "lifecycle/groups", "lifecycle/bare", "lifecycle/failures", "lifecycle/dead_letter", "lifecycle/breaker",
    "claim/expire", "claim/order", "claim/take", "claim/fairness", "claim/routing", "claim/turns",
    "claim/claim_partition", "claim/claim", "claim/leased",
    "lifecycle/lease_record", "lifecycle/settle_steps", "lifecycle/settle", "lifecycle/settle_before",
    "lifecycle/redrive", "lifecycle/replay", "lifecycle/rewind", "lifecycle/blocked",
    "pipelines/stage", "pipelines/staged_batches", "pipelines/pipelines", "pipelines/key_states", "pipelines/commit",
    "pipelines/pipeline_writes",
    "log/transactions",
    "upkeep/segments", "upkeep/drop_unresolved", "upkeep/upkeep", "upkeep/journal",
    "log/growth",
    "schedules/schedules", "schedules/ticks",
    "insights/views", "insights/doctor",
    "outbox/outbox", "outbox/outbox_claim", "outbox/outbox_operate", "outbox/outbox_topics",
    "server/coalesced", "server/claim_each", "server/apikeys",
    "insights/figures", "insights/offset_map",
)  # fmt: skip


def read_script(*path: str) -> LiteralString:
    # a file of our own package counts as a literal
    return resources.files("custody.store").joinpath("sql", *path).read_text(encoding="utf-8")


def script_of(*names: str) -> LiteralString:
    """Joins SQL files to one script."""
    return "\n".join(read_script(f"{name}.sql") for name in names)


GUARD: LiteralString = "require_read_committed"
"""The function that every verb calls first (base/guard.sql). In the database its name has the digest, too."""


@cache
def functions() -> tuple[LiteralString, str]:
    """All functions and views as one script, and its digest."""
    return guarded(script_of(*FUNCTIONS, *former()))


def guarded(script: LiteralString) -> tuple[LiteralString, str]:
    """A script whose guard has the script's digest in its name and text; and that digest.

    A verb that has begun before a migration, and calls its guard after it, does not find it: so no verb runs with
    functions of two releases.
    """
    digest = hashlib.sha256(script.encode()).hexdigest()[:16]
    return script.replace(GUARD, f"{GUARD}_{digest}").replace("<digest>", digest), digest


@cache
def former() -> tuple[LiteralString, ...]:
    """Functions as earlier releases call them (sql/former): those of releases that still work beside this one."""
    names = (entry.name for entry in resources.files("custody.store").joinpath("sql", "former").iterdir())
    kept = sorted(name[:-4] for name in names if name.endswith(".sql") and int(name.partition("_")[0]) >= OLDEST)
    return tuple(f"former/{name}" for name in kept)


_FUNCTION = re.compile(
    r"CREATE (?:OR REPLACE )?FUNCTION custody\.(\w+)\((.*?)\)\s+"
    r"(?:RETURNS (?:SETOF )?(?:TABLE \((?P<columns>[^)]*)\)|custody\.(?P<type>\w+)\b|)|LANGUAGE)",
    re.DOTALL,
)
_TYPE = re.compile(r"^CREATE TYPE custody\.(\w+) AS \(([^)]*)\)", re.MULTILINE)
_COLUMN = re.compile(r'(?:^|,)\s*"?(\w+)"?')
_COMMENT = re.compile(r"--[^\n]*")


Signature = tuple[tuple[str, ...], tuple[str, ...]]
"""The parameters of a function, without `p_`, and its columns."""


@cache
def present() -> dict[str, Signature]:
    """The functions in their form of this release."""
    return _signatures(script_of(*FUNCTIONS))


@cache
def _known() -> dict[str, Signature]:
    return _signatures(script_of(*former())) | present()


def _signatures(script: str) -> dict[str, Signature]:
    script = _COMMENT.sub("", script)
    types = {name: tuple(_COLUMN.findall(columns)) for name, columns in _TYPE.findall(script)}
    found = {}
    for one in _FUNCTION.finditer(script):
        columns = _COLUMN.findall(one["columns"]) if one["columns"] else types.get(one["type"] or "", ())
        found[one[1]] = tuple(re.findall(r"\bp_(\w+)", one[2])), tuple(columns)
    return found


def parameters_of(function: str) -> tuple[str, ...]:
    """The names of an SQL function's parameters, without `p_`."""
    return _known()[function][0]


def columns_of(function: str) -> tuple[str, ...]:
    """The columns of an SQL function; empty if it returns one value, or a row of a table or view."""
    return _known()[function][1]
