"""The tables, SQL functions and views: the files that they are made of, and the parameters of each function."""

from __future__ import annotations

import hashlib
import re
from functools import cache
from importlib import resources
from typing import LiteralString

# In this order: a table refers to earlier ones.
SCHEMA = ("ledger", "log", "producers", "groups", "leases", "journal", "pipelines", "api_keys", "schedules")
OUTBOX = "outbox"
"""The part of the schema, and the prefix of the migrations, that a standalone outbox has too."""

# In this order: a type or a view needs what it is made of.
FUNCTIONS = (
    "base/refuse", "base/guards", "base/ranges",
    "log/topics", "log/priorities", "log/read", "log/bulk_reads",
    "insights/stats",
    "log/delays", "log/append", "log/publish", "log/producers",
    "lifecycle/groups", "lifecycle/bare", "lifecycle/failures", "lifecycle/dead_letter", "lifecycle/breaker",
    "claim/expire", "claim/order", "claim/take", "claim/fairness", "claim/routing", "claim/turns",
    "claim/claim_partition", "claim/claim", "claim/leased",
    "lifecycle/lease_record", "lifecycle/settle_steps", "lifecycle/settle", "lifecycle/redrive", "lifecycle/replay",
    "lifecycle/rewind", "lifecycle/blocked",
    "pipelines/stage", "pipelines/pipelines", "pipelines/commit", "pipelines/pipeline_writes",
    "log/transactions",
    "upkeep/segments", "upkeep/drop_unresolved", "upkeep/upkeep", "upkeep/journal",
    "log/growth",
    "schedules/schedules", "schedules/ticks",
    "insights/views", "insights/doctor",
    "outbox/outbox", "outbox/outbox_claim", "outbox/outbox_operate", "outbox/outbox_topics",
    "server/coalesced", "server/claim_each", "server/apikeys",
    "insights/figures",
)  # fmt: skip


def read_script(*path: str) -> LiteralString:
    # a file of our own package counts as a literal
    return resources.files("custody.store").joinpath("sql", *path).read_text(encoding="utf-8")


def script_of(*names: str) -> LiteralString:
    """Joins SQL files to one script."""
    return "\n".join(read_script(f"{name}.sql") for name in names)


@cache
def functions() -> tuple[LiteralString, str]:
    """All functions and views as one script, and its digest."""
    script = script_of(*FUNCTIONS)
    return script, hashlib.sha256(script.encode()).hexdigest()[:16]


_FUNCTION = re.compile(r"CREATE (?:OR REPLACE )?FUNCTION custody\.(\w+)\((.*?)\)\s+(?:RETURNS|LANGUAGE)", re.DOTALL)


@cache
def _parameters() -> dict[str, tuple[str, ...]]:
    return {name: tuple(re.findall(r"\bp_(\w+)", given)) for name, given in _FUNCTION.findall(functions()[0])}


def parameters_of(function: str) -> tuple[str, ...]:
    """The names of an SQL function's parameters, without `p_`."""
    return _parameters()[function]
