"""Bounds of the numbers and strings that verbs take, for every interface.

Checked are parameters whose type has an `int` or a `str`; a time needs a time zone. The façade and the objects that it
returns check their arguments before anything else happens. Requests over HTTP have the same bounds in their schema.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection
from datetime import datetime
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from msgspec import UNSET, UnsetType

from custody.errors import InvalidArgument, PartitionNotFound, did_you_mean
from custody.model.limits import LARGE, NAME_LENGTH, SMALL
from custody.model.policy import require_zone

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
"""Offsets, sequences and ids. Whether one exists is checked by the verb."""


def require(name: str, value: Any) -> None:
    """Refuses what is not a whole number, or cannot be stored."""
    least, most = _BOUNDS.get(name, _OTHERS)
    if isinstance(value, int) and not isinstance(value, bool):
        if least <= value <= most:
            return
        if name == "partition":
            raise PartitionNotFound(f"there is no partition {value}", "Partitions are numbered from 0.")
    raise InvalidArgument(
        f"{name} cannot be {_shown(value)}", f"It is a whole number{'' if least < 0 else f' from {least}'} to {most:,}."
    )


def require_each(name: str, values: Any) -> None:
    """The same for many: a list, or the keys of a mapping."""
    if isinstance(values, str | bytes) or not isinstance(values, Collection):
        raise InvalidArgument(f"{name} cannot be {_shown(values)}", "Give a list of whole numbers.")
    for value in values:
        require(name, value)


_ANY_TEXT = {"error"}
"""Not checked, because an error is made storable instead: its text must never make an outcome fail."""


def require_text(name: str, value: Any) -> None:
    """Refuses what is not a string, or cannot be stored by PostgreSQL."""
    if name in _ANY_TEXT:
        return
    if not isinstance(value, str):
        raise InvalidArgument(f"{name} cannot be {_shown(value)}", "It is a string.")
    if name == "producer_id" and len(value) > NAME_LENGTH:
        raise InvalidArgument(f"{name} has more than {NAME_LENGTH} characters", "Shorten it, or use a hash of it.")
    if "\0" in value:
        raise InvalidArgument(f"{name} has a NUL character", "Remove it: PostgreSQL cannot store it in text.")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise InvalidArgument(
                f"{name} has a lone surrogate, which is not a character", "Decode the text with the right encoding."
            ) from None


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:80]}…"


Check = Callable[[str, Any], None]
"""Checks a value; the name of its parameter is for the error."""


class Bounded:
    """A class whose public methods and constructor refuse numbers and strings that cannot be stored."""

    def __init_subclass__(cls, **rest: Any) -> None:
        super().__init_subclass__(**rest)
        for name, verb in list(vars(cls).items()):
            if inspect.isfunction(verb) and (name == "__init__" or not name.startswith("_")):
                setattr(cls, name, bounded(verb))


def hints_of(verb: Callable[..., Any]) -> dict[str, Any]:
    """The type of each parameter of a verb; for `**rest: Unpack[…]` the types of its fields."""
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
    """The members of a union, without annotations."""
    if get_origin(hint) is Annotated:
        return _members(hint.__origin__)
    if get_origin(hint) in (Union, UnionType):
        return {kind for one in get_args(hint) for kind in _members(one)}
    return {hint}


def _check_of(hint: Any) -> Check | None:
    """The check for a parameter of this type, if there is one."""
    kinds = _members(hint)
    given = kinds - {NoneType, UnsetType}
    check: Check | None = None
    if given == {str}:
        check = require_text
    elif given == {datetime}:
        check = _require_zone
    elif given == {int}:
        check = require
    elif any(map(_lists_numbers, given)):
        check = _unless_of({kind for kind in given if isinstance(kind, type)})
    return _if_given(check) if check is not None and given != kinds else check


def _lists_numbers(kind: Any) -> bool:
    """Whether it is a list of numbers, or a mapping with such keys."""
    of = get_origin(kind)
    return isinstance(of, type) and issubclass(of, Collection) and int in _members(get_args(kind)[0])


def _require_zone(_name: str, value: Any) -> None:
    require_zone(value)


def _unless_of(others: set[type]) -> Check:
    """Checks each number of a value, unless it is one of the other types that the parameter may have."""
    kinds = tuple(others)
    return lambda name, value: None if isinstance(value, kinds) else require_each(name, value)


def _if_given(check: Check) -> Check:
    return lambda name, value: None if value is None or value is UNSET else check(name, value)


def bounded(verb: Callable[..., Any]) -> Callable[..., Any]:
    """The verb with a check that refuses numbers, strings and times that cannot be stored."""
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
