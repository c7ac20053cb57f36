"""Verbs of the façade by their signatures, so that a new one is tried by itself, and what they are given."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterator
from typing import Any
from uuid import UUID

import pytest

import custody
from custody import Custody, Outcome, Outgoing

GIVEN: dict[str, Any] = {
    "topic": "orders",
    "group": "stock",
    "dlq_topic": "orders",
    "name": "made",
    "partition": 0,
    "partitions": 2,
    "offset": 0,
    "delay_id": 1,
    "next_offset": 0,
    "payload": 1,
    "messages": [1],
    "key": "k",
    "producer_id": "p",
    "lease_id": UUID(int=1),
    "policy": custody.Policy(),
    "outcomes": {0: Outcome("ack")},
    "after": "1s",
    "handler": print,
    "bindings": None,
    "retention": None,
    "topics": ["orders"],
    "events": [],
    "role": "app",
    "to": "nobody",
    "app": "shop",
    "names": ["made"],
}
"""Arguments that a verb needs beside the number that is tried."""
ALSO: dict[str, dict[str, Any]] = {
    "publish_many": {"producer_id": "p", "epoch": 1, "sequence": 0},
    "publish_delayed": {"messages": [Outgoing(1, delay="1h")], "producer_id": "p", "epoch": 1, "sequence": 0},
    "create_group": {"group": "made"},
    "rewind": {"to_offset": 0},
    "create_api_key": {"admin": ["*"]},
    "create_schedule": {"every": "1m"},
    "ensure_schedule": {"every": "1m"},
    "change_topic": {"retention": None},
    "change_group": {"bindings": None},
}
NOT_TRIED = {"work", "listen", "close", "drive", "driver_verbs", "figures"}
"""Loops, which `worker_for` stands for, and what is of Spark."""


def verbs() -> Iterator[tuple[str, Callable[..., Any]]]:
    for name, verb in inspect.getmembers(Custody, inspect.isfunction):
        if not name.startswith("_") and name not in NOT_TRIED:
            yield name, verb


def parameters(of: Callable[[Any], bool]) -> Iterator[Any]:
    """Each verb with each of its parameters of some kind."""
    for name, verb in verbs():
        hints = typing.get_type_hints(verb)
        for parameter in inspect.signature(verb).parameters.values():
            if parameter.name in hints and parameter.name != "events" and of(hints[parameter.name]):
                yield pytest.param(name, parameter.name, id=f"{name}-{parameter.name}")


def arguments(name: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for parameter in list(inspect.signature(getattr(Custody, name)).parameters.values())[1:]:
        if parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD:
            assert parameter.name in GIVEN, f"say in GIVEN what {name} may be given for {parameter.name}"
            found[parameter.name] = GIVEN[parameter.name]
    return found | ALSO.get(name, {})
