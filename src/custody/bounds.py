"""How large the numbers may be that verbs take: one place for every entrance.

A number of a verb is a parameter whose annotation names `int`. The façade and what it hands out check theirs before
anything else happens, whichever way a call goes from there; requests over HTTP have the same bounds in their schema.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Collection
from typing import Any

from custody.errors import InvalidArgument, PartitionNotFound

SMALL = 2**31 - 1
"""The largest number of an `int` column."""
LARGE = 2**63 - 2**33
"""The largest number of a `bigint`, and a batch before its end: what is added to an offset stays in its range."""

_BOUNDS: dict[str, tuple[int, int]] = {
    "partition": (-SMALL, SMALL),
    "partitions": (-SMALL, SMALL),
    "max_messages": (1, SMALL),
    "limit": (0, SMALL),
    "concurrency": (1, SMALL),
    "epoch": (-SMALL, SMALL),
    "first": (0, SMALL),
    "replays": (0, SMALL),
}
_OTHERS = (-LARGE, LARGE)
"""Of offsets, sequences and ids. Whether there is such a one is the verb's own matter."""


def require(name: str, value: Any) -> None:
    """Refuses what is not a whole number, or none that could be stored."""
    if value is None:
        return
    least, most = _BOUNDS.get(name, _OTHERS)
    if isinstance(value, int) and not isinstance(value, bool):
        if least <= value <= most:
            return
        if name == "partition":
            raise PartitionNotFound(f"there is no partition {value}", "Partitions are counted from 0.")
    raise InvalidArgument(
        f"{name} cannot be {_shown(value)}", f"It is a whole number{'' if least < 0 else f' from {least}'} to {most:,}."
    )


def require_each(name: str, values: Any) -> None:
    """The same of many: a list, or the keys of a mapping."""
    if values is None:
        return
    if isinstance(values, str | bytes) or not isinstance(values, Collection):
        raise InvalidArgument(f"{name} cannot be {_shown(values)}", "Give a list of whole numbers.")
    for value in values:
        require(name, value)


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:80]}…"


class Bounded:
    """A class whose public methods, and whose construction, refuse numbers out of range."""

    def __init_subclass__(cls, **rest: Any) -> None:
        super().__init_subclass__(**rest)
        for name, verb in list(vars(cls).items()):
            if inspect.isfunction(verb) and (name == "__init__" or not name.startswith("_")):
                setattr(cls, name, _bounded(verb))


def _bounded(verb: Callable[..., Any]) -> Callable[..., Any]:
    parameters = list(inspect.signature(verb).parameters.values())
    named = {
        one.name: require_each if re.search(r"Sequence|Mapping|Iterable|list|dict", str(one.annotation)) else require
        for one in parameters
        if re.search(r"\bint\b", str(one.annotation)) and "tuple" not in str(one.annotation)
    }
    if not named:
        return verb
    placed = [(place, one.name) for place, one in enumerate(parameters) if one.name in named]

    @functools.wraps(verb)
    def bounded(*given: Any, **rest: Any) -> Any:
        for place, name in placed:
            if place < len(given):
                named[name](name, given[place])
        for name, value in rest.items():
            if name in named:
                named[name](name, value)
        return verb(*given, **rest)

    return bounded
