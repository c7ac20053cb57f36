"""Makes methods of the client of declared verbs. Each sends one request, and returns what the verb itself returns."""

from __future__ import annotations

import abc
import functools
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar, cast, get_args
from urllib.parse import quote

from msgspec import UNSET

from custody.errors import NeedsDatabase, OffsetOutOfRange, PartitionNotFound
from custody.model.bounds import bounded
from custody.model.limits import LARGEST
from custody.remote.base import REMEDY, RemoteBase, group_path, is_name, require_topic
from custody.remote.transport import Tries
from custody.remote.values import is_possible_offset, require_partition
from custody.wire.fields import Range
from custody.wire.verb import Verb, sent_as


def derive(client: type, facade: type) -> None:
    """Adds to a client the public methods of the façade that are neither written by hand nor composed of others. A
    declared verb becomes a request; any other method raises `needs_database`."""
    own = {name for kind in client.__mro__ if not issubclass(facade, kind) for name in vars(kind)}
    for name, function in inspect.getmembers(facade, inspect.isfunction):
        if not name.startswith("_") and name not in own and not hasattr(function, "__composed__"):
            verb = getattr(function, "__verb__", None)
            setattr(client, name, bounded(_refusal(function) if verb is None else method_of(verb)))
    abc.update_abstractmethods(client)


def _refusal(function: Callable[..., Any]) -> Callable[..., NoReturn]:
    @functools.wraps(function)
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise NeedsDatabase(remedy=REMEDY)

    return refuse


def method_of(verb: Verb) -> Callable[..., Any]:
    """The verb over HTTP, with the signature of its declaration."""
    return _method(verb, request)


M = TypeVar("M", bound=Callable[..., Any])
Step = Callable[[Any, Verb, dict[str, Any]], Any]


def special(declared: M) -> Callable[[Step], M]:
    """Decorates a method for what a declaration cannot express. It gets the verb, and the arguments by name."""

    def decorate(step: Step) -> M:
        return cast(M, _method(declared.__verb__, step))  # type: ignore[attr-defined]  # of `@verb`

    return decorate


def _method(verb: Verb, step: Step) -> Callable[..., Any]:
    @functools.wraps(verb.function)
    def method(self: RemoteBase, *args: Any, **rest: Any) -> Any:
        return step(self, verb, verb.given(args, rest))

    vars(method).pop("__isabstractmethod__", None)
    return method


def request(client: RemoteBase, verb: Verb, given: Mapping[str, Any], tries: Tries | None = None) -> Any:
    """Calls the verb at the server, and returns what the verb itself would return."""
    try:
        sent = prepared(client, verb, given)
    except (PartitionNotFound, OffsetOutOfRange):
        if isinstance(verb.nowhere, list):
            return list(verb.nowhere)
        raise
    shape = {name: value for name, value in sent.items() if name not in verb.in_path}
    answer = client._call(
        verb.method,
        _filled(verb, verb.path, sent),
        type(None) if verb.answer is None else verb.answer,
        query=verb.query(**shape) if verb.body is None and shape else None,
        body=None if verb.body is None else verb.body(**shape),
        repeat=bool(given[verb.repeat]) if isinstance(verb.repeat, str) else verb.repeat,
        tries=tries,
        **client._patience.get(verb.name, {}),
    )
    found = verb.value(answer)
    for name, value in given.items():
        if _range(verb.hints[name]) is Range.PAGE:
            found = found[:value]  # a request has to ask for at least one, also if the caller wants none
    return found


def prepared(client: RemoteBase, verb: Verb, given: Mapping[str, Any]) -> dict[str, Any]:
    """Converts the arguments of a verb for a request. A place that no log can have is refused as by the verb itself."""
    _require_names(verb, given)
    try:
        return {name: _sent(verb, name, value) for name, value in given.items()}
    except (PartitionNotFound, verb.refusal):
        client._call(
            "GET", _filled(verb, verb.thing, given), dict[str, Any]
        )  # a missing topic or group is reported first
        raise


def _range(hint: Any) -> Range | None:
    """The Range of a parameter, also inside a list or an optional type."""
    for one in (*getattr(hint, "__metadata__", ()), *get_args(hint)):
        found = one if isinstance(one, Range) else _range(one)
        if found is not None:
            return found
    return None


def _sent(verb: Verb, name: str, value: Any) -> Any:
    """Converts a value for a request."""
    if value is None or value is UNSET:
        return value
    if (other := sent_as(verb.hints[name])) is not None:
        return other.of(value)
    kind = _range(verb.hints[name])
    if kind is None:
        return list(value) if isinstance(value, tuple) else value
    if kind is Range.PAGE:
        most = next(one.le for one in verb.hints[name].__metadata__ if hasattr(one, "le"))
        return max(1, min(value, most))
    if kind is Range.OFFSET and not isinstance(value, int):
        return [offset for offset in value if is_possible_offset(offset)]
    if kind is Range.PARTITION:
        require_partition(value)
    if kind is Range.OFFSET and value < 0:
        raise verb.refusal(f"there is nothing at {value}", "Offsets begin with 0.")
    return min(value, LARGEST)


def _require_names(verb: Verb, given: Mapping[str, Any]) -> None:
    """Refuses a text that cannot be the name of a topic or group like one that does not exist."""
    for placeholder in re.findall(r"{(\w+)}", verb.thing):
        value = given[verb.parameter(placeholder)]
        if placeholder == "group":
            group_path(given["topic"], value)
        else:
            require_topic(value)


def _filled(verb: Verb, path: str, given: Mapping[str, Any]) -> str:
    """A path with its placeholders filled in."""
    return re.sub(r"{(\w+)}", lambda found: _quoted(str(given[verb.parameter(found[1])])), path)


def _quoted(value: str) -> str:
    # dots too, because a segment of dots would be resolved as a relative path
    return value if is_name(value) else quote(value, safe="").replace(".", "%2E")
