"""Methods of the client that are made of declared verbs: each is one request, and answers as the verb itself does."""

from __future__ import annotations

import abc
import functools
import inspect
import re
from collections.abc import Callable, Mapping, Set
from typing import Any, NoReturn, get_args
from urllib.parse import quote

from custody.errors import NeedsDatabase, OffsetOutOfRange, PartitionNotFound
from custody.model.bounds import bounded
from custody.remote.base import REMEDY, RemoteBase, group_path, is_name, require_topic
from custody.remote.values import possible, require_partition
from custody.wire.fields import LARGEST, Range
from custody.wire.verb import Verb, sent_as


def derive(client: type, facade: type, composed: Set[str]) -> None:
    """Gives a client the public methods of the façade that it does not have by hand: those that are declared as verbs
    become requests, and others are refused."""
    own = {name for kind in client.__mro__ if not issubclass(facade, kind) for name in vars(kind)}
    for name, function in inspect.getmembers(facade, inspect.isfunction):
        if not name.startswith("_") and name not in own | composed:
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

    @functools.wraps(verb.function)
    def method(self: RemoteBase, *args: Any, **rest: Any) -> Any:
        given = verb.given(args, rest)
        try:
            sent = prepared(self, verb, given)
        except (PartitionNotFound, OffsetOutOfRange):
            if isinstance(verb.nowhere, list):
                return list(verb.nowhere)
            raise
        shape = {name: value for name, value in sent.items() if name not in verb.in_path}
        repeat = bool(given[verb.repeat]) if isinstance(verb.repeat, str) else verb.repeat
        answer = self._call(
            verb.method,
            _filled(verb, verb.path, sent),
            type(None) if verb.answer is None else verb.answer,
            query=verb.query(**shape) if verb.body is None and shape else None,
            body=None if verb.body is None else verb.body(**shape),
            repeat=repeat,
            **self._patience.get(verb.name, {}),
        )
        found = verb.value(answer)
        for name, value in given.items():
            if _range(verb.hints[name]) is Range.PAGE:
                found = found[:value]  # a request for none has to be one for one
        return found

    vars(method).pop("__isabstractmethod__", None)
    return method


def prepared(client: RemoteBase, verb: Verb, given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a verb as a request takes them. What no log has is refused here as the verb itself refuses it."""
    _require_names(verb, given)
    try:
        return {name: _sent(verb, name, value) for name, value in given.items()}
    except (PartitionNotFound, verb.refusal):
        client._call("GET", _filled(verb, verb.thing, given), dict[str, Any])  # what is not there at all comes first
        raise


def _range(hint: Any) -> Range | None:
    """The kind of number that a parameter is, by itself, in a list, or if it is given."""
    for one in (*getattr(hint, "__metadata__", ()), *get_args(hint)):
        found = one if isinstance(one, Range) else _range(one)
        if found is not None:
            return found
    return None


def _sent(verb: Verb, name: str, value: Any) -> Any:
    """A value as a request takes it."""
    if (other := sent_as(verb.hints[name])) is not None:
        return other.of(value)
    kind = _range(verb.hints[name])
    if value is None or kind is None:
        return value
    if kind is Range.PAGE:
        most = next(one.le for one in verb.hints[name].__metadata__ if hasattr(one, "le"))
        return max(1, min(value, most))
    if kind is Range.OFFSET and not isinstance(value, int):
        return [offset for offset in value if possible(offset)]
    if kind is Range.PARTITION:
        require_partition(value)
    if kind is Range.OFFSET and value < 0:
        raise verb.refusal(f"there is nothing at {value}", "Offsets begin with 0.")
    return min(value, LARGEST)


def _require_names(verb: Verb, given: Mapping[str, Any]) -> None:
    """What cannot be the name of a topic or a group is refused as any one that is not there."""
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
    # dots too: a path of dots would be taken for a way up
    return value if is_name(value) else quote(value, safe="").replace(".", "%2E")
