"""Declares verbs: the typed method of the façade says what a verb takes and returns; `@verb` adds its HTTP path and who
may call it. The server's operation (http/derived.py) and the client's method (remote/derived.py) are made of both."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, cast, get_args, get_origin

import msgspec
from msgspec import Meta

from custody.errors import CustodyError, OffsetOutOfRange
from custody.model.bounds import hints_of
from custody.model.plain import plain
from custody.wire.fields import Help, Sent, Text, When
from custody.wire.queries import NoQuery
from custody.wire.requests import Shape

F = TypeVar("F", bound=Callable[..., Any])
Method = Literal["GET", "POST", "PATCH", "DELETE"]
Right = Literal["produce", "consume", "admin", "any"]
Thread = Literal["slow", "quick", "read", "append"]
Tag = Literal["messages", "topics", "groups", "producers", "schedules", "operating"]


@dataclass(frozen=True, kw_only=True)
class Verb:
    """A verb and its HTTP operation.

    `right` is needed on the topic in the path, or in the parameter `on`; without one, on any topic, or with
    `everywhere` on all topics. `repeat`: whether a client may repeat it after an unknown outcome; a name means: if that
    argument is true. It is the default for a GET. `nowhere`: the error or value by which the verb answers a negative
    offset. Before that the verb checks that the topic or group exists, which has the path `thing`.
    """

    function: Callable[..., Any]
    method: Method
    path: str
    tag: Tag
    right: Right
    everywhere: bool
    on: str | None
    answer: Any
    status: int
    example: Any
    repeat: bool | str
    nowhere: type[CustodyError] | list[Any]
    thing: str
    names: Mapping[str, str]
    operation: str
    thread: Thread

    @property
    def refusal(self) -> type[CustodyError]:
        """The error for a place that no log can have."""
        return OffsetOutOfRange if isinstance(self.nowhere, list) else self.nowhere

    @property
    def name(self) -> str:
        return self.function.__name__

    @cached_property
    def signature(self) -> inspect.Signature:
        return inspect.signature(self.function)

    @cached_property
    def hints(self) -> dict[str, Any]:
        """The types of the parameters by name."""
        return hints_of(self.function)

    @cached_property
    def in_path(self) -> dict[str, str]:
        """The parameters in the path, and the placeholder of each."""
        return {self.parameter(placeholder): placeholder for placeholder in re.findall(r"{(\w+)}", self.path)}

    def parameter(self, sent: str) -> str:
        """The parameter with this name over HTTP."""
        return next((name for name, other in self.names.items() if other == sent), sent)

    @cached_property
    def body(self) -> type[Shape] | None:
        """The type of the body; None if there is none."""
        return self._shape("In") if self.method in ("POST", "PATCH") and self._rest else None

    @cached_property
    def body_required(self) -> bool:
        return self.body is not None and any(one.required for one in msgspec.structs.fields(self.body))

    @cached_property
    def query(self) -> type[Shape]:
        """The type of the query string."""
        return self._shape("Query") if self.method in ("GET", "DELETE") and self._rest else NoQuery

    @cached_property
    def _rest(self) -> list[str]:
        return [name for name in self.hints if name not in self.in_path]

    def _shape(self, what: str) -> type[Shape]:
        fields: list[Any] = []
        for name in self._rest:
            parameter = self.signature.parameters.get(name)
            if parameter is None:  # of `**rest`
                fields.append((name, _sent(self.hints[name]), None))
            elif parameter.default is parameter.empty:
                fields.append((name, _sent(self.hints[name])))
            else:
                fields.append((name, _sent(self.hints[name]), parameter.default))
        title = "".join(part.title() for part in self.operation.split("_")) + what
        names = {name: self.names[name] for name in self._rest if name in self.names}
        about = {"__doc__": inspect.getdoc(self.function)}
        shape = msgspec.defstruct(title, fields, bases=(Shape,), kw_only=True, namespace=about, rename=names)
        return cast(type[Shape], shape)

    def given(self, args: Sequence[Any], rest: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a call by name, including defaults."""
        bound = self.signature.bind(None, *args, **rest)
        bound.apply_defaults()
        found: dict[str, Any] = {}
        for name, value in bound.arguments.items():
            found |= value if self.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD else {name: value}
        return {name: found.get(name) for name in self.hints}

    def answered(self, found: Any, given: Mapping[str, Any]) -> Any:
        """Converts the result of the verb into the answer; `given` are its arguments."""
        if self.answer is None:
            return None
        kind, many = _element(self.answer)
        if not hasattr(kind, "of"):
            return plain(found)
        if many:
            return [kind.of(one) for one in found]
        wanted = [one.name for one in inspect.signature(kind.of).parameters.values() if one.kind is one.KEYWORD_ONLY]
        return kind.of(found, **{name: given[name] for name in wanted})

    def value(self, answer: Any) -> Any:
        """Converts the answer back into the result of the verb."""
        kind, many = _element(self.answer)
        if not hasattr(kind, "value"):
            return answer
        return [one.value() for one in answer] if many else answer.value()


def _element(answer: Any) -> tuple[Any, bool]:
    """The type of an answer, or of each of its elements."""
    return (get_args(answer)[0], True) if get_origin(answer) is list else (answer, False)


def sent_as(hint: Any) -> Sent | None:
    """The conversion of a parameter that has another type in a request."""
    if get_origin(hint) in (Union, UnionType):
        return next((found for one in get_args(hint) if (found := sent_as(one))), None)
    if get_origin(hint) is Annotated:
        return _conversion(hint) or sent_as(hint.__origin__)
    return None


def _conversion(hint: Any) -> Sent | None:
    """The conversion that an annotated type names itself."""
    return next((one for one in hint.__metadata__ if isinstance(one, Sent)), None)


def _sent(hint: Any) -> Any:
    """The type of a parameter in a request. Help is moved to the outermost type: inside a union it would be hidden."""
    if get_origin(hint) is Annotated:
        help = [Meta(description=str(one)) for one in hint.__metadata__ if isinstance(one, Help)]
        other = _conversion(hint)
        rest = [] if other else [one for one in hint.__metadata__ if not isinstance(one, Help)]
        inner = other.kind if other else _sent(hint.__origin__) if not rest else hint.__origin__
        if not rest and not help:
            return inner
        return Annotated[(inner, *rest, *help)]
    if get_origin(hint) in (Union, UnionType):
        return Union[tuple(_sent(one) for one in get_args(hint))]  # noqa: UP007  # they are known at run time only
    origin = get_origin(hint)
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return list[_sent(get_args(hint)[0])]  # type: ignore[misc]
    if hint is int:
        raise TypeError("a number of a verb needs a type with bounds (see wire/fields.py)")
    return {str: Text, datetime: When, NoneType: None}.get(hint, hint)


def _thing(path: str) -> str:
    """The path of the topic or the group that a verb is for."""
    found = re.match(r".*{(topic|group)}", path)
    return found[0] if found else ""


def verb(
    method: Method,
    path: str,
    *,
    tag: Tag,
    right: Right,
    answer: Any,
    everywhere: bool = False,
    on: str | None = None,
    status: int | None = None,
    example: Any = None,
    repeat: bool | str | None = None,
    nowhere: type[CustodyError] | list[Any] = OffsetOutOfRange,
    thing: str | None = None,
    names: Mapping[str, str] | None = None,
    operation: str | None = None,
    thread: Thread = "slow",
) -> Callable[[F], F]:
    """Declares a method of the façade as a verb of the HTTP API too. Returns the method unchanged.

    `names` gives parameters another name over HTTP; `operation` names the operation. See `Verb` for the rest.
    """

    def declare(function: F) -> F:
        function.__verb__ = Verb(  # type: ignore[attr-defined]
            function=function,
            method=method,
            path=path,
            tag=tag,
            right=right,
            everywhere=everywhere,
            on=on,
            answer=answer,
            status=status or (204 if answer is None else 200),
            example=example,
            repeat=method == "GET" if repeat is None else repeat,
            nowhere=nowhere,
            thing=thing or _thing(path),
            names=names or {},
            operation=operation or function.__name__,
            thread=thread,
        )
        return function

    return declare


def composed(function: F) -> F:
    """Declares a method of the façade that only calls other methods of it, and so works unchanged in the client."""
    function.__composed__ = True  # type: ignore[attr-defined]
    return function


def declared(kind: type) -> dict[str, Verb]:
    """The verbs of a class, in the order of their declaration."""
    found: dict[str, Verb] = {}
    for base in reversed(kind.__mro__):
        found |= {name: method.__verb__ for name, method in vars(base).items() if hasattr(method, "__verb__")}
    return found
