"""Which numbers and texts verbs take: one place for every entrance.

A number of a verb is a parameter whose type has an `int`, a text one that is a `str`, and a time needs its zone. The
façade and what it hands out check theirs before anything else happens, whichever way a call goes from there; requests
over HTTP have the same bounds in their schema.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection
from datetime import datetime
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from custody.errors import InvalidArgument, PartitionNotFound, did_you_mean
from custody.model.policy import require_zone

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
    "pool_size": (1, SMALL),
    "max_per_batch": (1, SMALL),
    "maxRowsPerTrigger": (1, LARGE),
}
_OTHERS = (-LARGE, LARGE)
"""Of offsets, sequences and ids. Whether there is such a one is the verb's own matter."""


def require(name: str, value: Any) -> None:
    """Refuses what is not a whole number, or none that could be stored."""
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
    if isinstance(values, str | bytes) or not isinstance(values, Collection):
        raise InvalidArgument(f"{name} cannot be {_shown(values)}", "Give a list of whole numbers.")
    for value in values:
        require(name, value)


NAME_LENGTH = 200
"""A name that is stored as it is, in an index, has no more characters."""
_ANY_TEXT = {"error"}
"""What is stored of an error is made of it: the text of an error never loses an outcome."""


def require_text(name: str, value: Any) -> None:
    """Refuses what is no text, or none that PostgreSQL could store."""
    if name in _ANY_TEXT:
        return
    if not isinstance(value, str):
        raise InvalidArgument(f"{name} cannot be {_shown(value)}", "It is text.")
    if name == "producer_id" and len(value) > NAME_LENGTH:
        raise InvalidArgument(f"{name} has more than {NAME_LENGTH} characters", "Shorten it, or take a hash of it.")
    if "\0" in value:
        raise InvalidArgument(f"{name} has a NUL character", "Remove it: PostgreSQL cannot store one in a text.")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise InvalidArgument(
                f"{name} has half a surrogate pair, which is no character", "Decode the text with the right encoding."
            ) from None


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:80]}…"


Check = Callable[[str, Any], None]
"""Refuses a value under the name of its parameter."""


class Bounded:
    """A class whose public methods, and whose construction, refuse numbers and texts that could not be stored."""

    def __init_subclass__(cls, **rest: Any) -> None:
        super().__init_subclass__(**rest)
        for name, verb in list(vars(cls).items()):
            if inspect.isfunction(verb) and (name == "__init__" or not name.startswith("_")):
                setattr(cls, name, bounded(verb))


def hints_of(verb: Callable[..., Any]) -> dict[str, Any]:
    """The type of each parameter that a verb can be given; of `**rest: Unpack[…]` those of its fields."""
    found: dict[str, Any] = {}
    for one in inspect.signature(verb).parameters.values():
        hint = one.annotation
        if isinstance(hint, str):
            hint = eval(hint, inspect.unwrap(verb).__globals__)
        if one.kind is one.VAR_KEYWORD:
            if get_origin(hint) is not None:  # Unpack
                found |= get_type_hints(get_args(hint)[0], include_extras=True)
        elif hint is not one.empty:
            found[one.name] = hint
    return found


def _members(hint: Any) -> set[Any]:
    """The types of which a value may be one, without what annotates them."""
    if get_origin(hint) is Annotated:
        return _members(hint.__origin__)
    if get_origin(hint) in (Union, UnionType):
        return {kind for one in get_args(hint) for kind in _members(one)}
    return {hint}


def _check_of(hint: Any) -> Check | None:
    """What a parameter of this type has to stand."""
    kinds = _members(hint)
    given = kinds - {NoneType}
    check: Check | None = None
    if given == {str}:
        check = require_text
    elif given == {datetime}:
        check = _require_zone
    elif given == {int}:
        check = require
    elif any(_lists_numbers(kind) for kind in given):
        check = require_each
    return _unless_none(check) if check is not None and NoneType in kinds else check


def _lists_numbers(kind: Any) -> bool:
    """Whether it is a list of numbers, or a mapping by them."""
    of = get_origin(kind)
    return isinstance(of, type) and issubclass(of, Collection) and int in _members(get_args(kind)[0])


def _require_zone(_name: str, value: Any) -> None:
    require_zone(value)


def _unless_none(check: Check) -> Check:
    return lambda name, value: None if value is None else check(name, value)


def bounded(verb: Callable[..., Any]) -> Callable[..., Any]:
    """The verb, which refuses numbers, texts and times that could not be stored."""
    hints = hints_of(verb)
    named = {name: check for name, hint in hints.items() if (check := _check_of(hint)) is not None}
    if not named:
        return verb
    parameters = inspect.signature(verb).parameters
    placed = [(place, name) for place, name in enumerate(parameters) if name in named]
    chosen = hints.keys() - parameters.keys()

    @functools.wraps(verb)
    def checked(*given: Any, **rest: Any) -> Any:
        for place, name in placed:
            if place < len(given):
                named[name](name, given[place])
        for name, value in rest.items():
            if name in named:
                named[name](name, value)
            elif chosen and name not in hints:
                raise InvalidArgument(f"{verb.__name__} has no parameter {name!r}", did_you_mean(name, sorted(hints)))
        return verb(*given, **rest)

    return checked
