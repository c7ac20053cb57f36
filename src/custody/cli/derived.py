"""Makes commands of verbs: the arguments and options are those of the verb's parameters.

Name, type, bounds, help and default of a parameter stand once, at the verb. The command itself is a function that
calls the verb and shows the result.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from types import NoneType, UnionType
from typing import Annotated, Any, Concatenate, Literal, TypeVar, Union, get_args, get_origin
from uuid import UUID

import msgspec
import typer
from msgspec import UNSET, UnsetType

from custody.cli import arguments, composite
from custody.cli.arguments import Yes
from custody.cli.call import Call
from custody.cli.session import Session, session_of
from custody.model.bounds import hints_of
from custody.outbox import EventState
from custody.wire.fields import PLACES, GivenSize, GivenTimeout, Help, NewName, Range, Sent
from custody.wire.policies import GivenStart
from custody.wire.verb import sent_as

R = TypeVar("R")
Renderer = Callable[Concatenate[Call[R], ...], int | None]
Command = Callable[..., int | None]

SHORT = {"key": "-k", "partitions": "-p", "topic": "-t"}
NEW = get_args(NewName)[1]
"""Marks a name that nothing has yet, so that none is offered."""
LARGEST = 1_000_000
"""A greater bound says nothing to a reader of the help."""


def calls(
    verb: Callable[..., R],
    *,
    on: Callable[[Session], AbstractContextManager[Any]] = Session.connect,
    names: Mapping[str, str] | None = None,
    arguments: Collection[str] = (),
    options: Collection[str] = (),
    without: Collection[str] = (),
    confirms: bool = False,
) -> Callable[[Renderer[R]], Command]:
    """Makes a command of a function that gets a call of the verb, and of the given parameters those that it names.

    Its further parameters are options of the command line alone. `names` renames parameters; `arguments` and `options`
    say of parameters that they are one or the other; `without` are those that the command does not have. `confirms`
    adds `--yes`. Its help is the docstring of the function; without one, the first paragraph of the verb's.
    """
    found = _parameters(verb, names or {}, arguments, options, without)

    def decorate(show: Renderer[R]) -> Command:
        own = list(inspect.signature(show, eval_str=True).parameters.values())[1:]
        taken = {one.name for one in found}

        @functools.wraps(show)
        def run(ctx: typer.Context, **values: Any) -> int | None:
            given = {one.name: value for one in found if (value := one.read(values)) is not UNSET}
            places = {one.name: one.written for one in found if one.place and one.name in given}
            call = Call[R](session_of(ctx), verb.__name__, on, given, places, yes=values.get("yes", False))
            shown = {name: given.get(name, default) for name, default in defaults.items()}
            with call:
                return show(call, **shown, **{one.name: values[one.name] for one in own if one.name not in taken})

        defaults = {one.name: one.default for one in found if one.name in {parameter.name for parameter in own}}
        extra = [one.replace(kind=one.KEYWORD_ONLY) for one in own if one.name not in taken]
        parameters = [_CONTEXT, *(option for one in found for option in one.options), *extra, *([_YES] * confirms)]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # for typer
        run.__doc__ = inspect.getdoc(show) or (inspect.getdoc(verb) or "").partition("\n\n")[0]
        run.__verb__ = verb  # type: ignore[attr-defined]
        return run

    return decorate


_CONTEXT = inspect.Parameter("ctx", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
_YES = inspect.Parameter("yes", inspect.Parameter.KEYWORD_ONLY, annotation=Yes, default=False)


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """A parameter of a verb on the command line. `read` returns its value, UNSET if it was not given."""

    name: str
    written: str
    place: bool
    default: Any
    options: Sequence[inspect.Parameter]
    read: Callable[[Mapping[str, Any]], Any]


def _parameters(
    verb: Callable[..., Any],
    names: Mapping[str, str],
    arguments: Collection[str],
    options: Collection[str],
    without: Collection[str],
) -> list[Parameter]:
    declared = inspect.signature(verb).parameters
    found = []
    for name, hint in hints_of(verb).items():
        if name in without:
            continue
        parameter = declared.get(name)
        default = None if parameter is None else parameter.default
        required = default is inspect.Parameter.empty
        named = name in options or (parameter is not None and parameter.kind is parameter.KEYWORD_ONLY)
        place = name in arguments or (required and not named)
        found.append(_parameter(name, names.get(name), hint, default, place=place, required=required))
    return sorted(found, key=lambda one: not one.place)


def _parameter(name: str, renamed: str | None, hint: Any, default: Any, *, place: bool, required: bool) -> Parameter:
    kind, notes = _reduced(hint)
    help = next((one for one in reversed(notes) if isinstance(one, Help)), Help(PLACES.get(renamed or name, "")))
    made = composite.of(sent_as(hint))
    if made is not None:
        default = None if default is inspect.Parameter.empty or default is UNSET else default
        return Parameter(name=name, written=name, place=False, default=default, options=made.options, read=made.read)
    many = isinstance(get_origin(kind), type) and issubclass(get_origin(kind), Collection)
    written = renamed or (name.removesuffix("s") if many and not place else name)
    option = _option(written, kind, notes, help, default, many=many, place=place, required=required)

    def read(values: Mapping[str, Any]) -> Any:
        value = values[written]
        return UNSET if value is None or value is False or value == [] else value

    shown = None if required or default is UNSET else default
    return Parameter(name=name, written=written, place=place, default=shown, options=[option], read=read)


def _option(
    written: str,
    kind: Any,
    notes: Sequence[Any],
    help: Help,
    default: Any,
    *,
    many: bool,
    place: bool,
    required: bool,
) -> inspect.Parameter:
    if many:
        kind, inner = _reduced(get_args(kind)[0])
        notes = [*notes, *inner]
    kind, how = _form(kind, notes)
    how["help"] = help
    if help.metavar is not None:
        how["metavar"] = help.metavar
    if (completion := arguments.COMPLETED.get(written)) is not None and NEW not in notes:
        how["autocompletion"] = completion
    if not required and default not in (None, False, UNSET) and not many:
        how["help"] = f"{help.removesuffix('.')} (default: {default})."
    elif kind is datetime:
        how["help"] = f"{help} For example 2030-01-31T12:00Z, or 15m for 15 minutes ago."
    elif many and not place:
        how["help"] = f"{help} May be repeated."
    if place:
        made = typer.Argument(**how)
    else:
        made = typer.Option(f"--{written.replace('_', '-')}", *([SHORT[written]] if written in SHORT else []), **how)
    if many:
        kind = list[kind]
    if not required:
        kind = kind if kind is bool else kind | None
    annotation: Any = Annotated[kind, made]
    start = inspect.Parameter.empty if required else False if kind is bool else None
    return inspect.Parameter(written, inspect.Parameter.KEYWORD_ONLY, default=start, annotation=annotation)


def _reduced(hint: Any) -> tuple[Any, list[Any]]:
    """A type without what says that it may be left out, and all annotations on the way to it."""
    if get_origin(hint) is Annotated:
        kind, notes = _reduced(hint.__origin__)
        return kind, [*notes, *hint.__metadata__]
    if get_origin(hint) in (Union, UnionType):
        members = [one for one in get_args(hint) if one not in (NoneType, UnsetType)]
        if len(members) == 1:
            return _reduced(members[0])
    return hint, []


def _form(kind: Any, notes: Sequence[Any]) -> tuple[Any, dict[str, Any]]:
    """The type of an option, and typer's arguments for it."""
    for note in notes:
        if isinstance(note, Sent) and note in _PARSED:
            return Any, dict(_PARSED[note])
    if EventState in get_args(kind):
        return Any, {"parser": arguments.event_state, "metavar": "STATE"}
    if kind is datetime:
        return datetime, {"parser": arguments.time, "metavar": "TIME"}
    if kind is int:
        bounds = [note for note in notes if isinstance(note, msgspec.Meta)]
        least = next((one.ge for one in bounds if one.ge is not None), None)
        clamped = any(isinstance(note, Range) for note in notes)
        most = next((one.le for one in bounds if one.le is not None and one.le <= LARGEST and not clamped), None)
        return int, {"min": least, "max": most}
    if kind in (str, bool, UUID) or get_origin(kind) is Literal:
        return kind, {}
    raise TypeError(f"no option can be made of the type {kind}")


_PARSED: dict[Any, dict[str, Any]] = {
    sent_as(GivenTimeout): arguments.DURATION,
    sent_as(GivenSize): arguments.SIZE,
    sent_as(GivenStart): {"parser": arguments.start, "metavar": "earliest|latest|OFFSET|TIME"},
}
