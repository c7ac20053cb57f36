"""Redaction of an incident: fields of payloads, headers and the key are replaced, also where an error quotes them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import msgspec

from custody.errors import InvalidArgument, did_you_mean
from custody.model.entities import Message
from custody.testing.incident import Incident

REDACTED = "redacted"
QUOTED = 4
"""Shortest value that is looked for in errors: a shorter one is in many words by chance."""


def redacted(
    incident: Incident, *, fields: Iterable[str] = (), headers: Iterable[str] = (), key: bool = False
) -> Incident:
    """The incident without these values. `fields` are paths, such as `customer.email`; in a list each element counts.

    A value of another type is replaced by one of its type: 0, false, an empty list. Refuses a path or a header that no
    message has, and a payload that has no fields.
    """
    removing = _Removing()
    messages = [removing.fields(message, list(fields)) for message in incident.messages]
    messages = [removing.headers(message, list(headers)) for message in messages]
    if key:
        messages = [removing.key(message) for message in messages]
    removing.require_found(fields, headers)
    attempts = tuple(attempt._replace(error=removing.from_text(attempt.error)) for attempt in incident.attempts)
    return replace(
        incident,
        message=messages[-1],
        before=tuple(messages[:-1]),
        attempts=attempts,
        traceback=removing.from_text(incident.traceback),
    )


class _Removing:
    def __init__(self) -> None:
        self._values: set[str] = set()
        self._found: set[str] = set()
        self._names: set[str] = set()

    def fields(self, message: Message, paths: list[str]) -> Message:
        if not paths:
            return message
        if not isinstance(message.payload, dict | list):
            raise InvalidArgument(
                f"the payload of {message.partition}/{message.offset} is {_kind(message.payload)}: it has no fields",
                "Leave --redact out, or messages before it (--before 0).",
            )
        payload = message.payload
        for path in paths:
            payload = self._without(payload, path, path.split("."))
        return msgspec.structs.replace(message, payload=payload)

    def headers(self, message: Message, names: list[str]) -> Message:
        wanted = {name: value for name, value in message.headers.items() if name in names}
        self._found.update(wanted)
        self._names.update(message.headers)
        self._values.update(wanted.values())
        return msgspec.structs.replace(message, headers={**message.headers, **dict.fromkeys(wanted, REDACTED)})

    def key(self, message: Message) -> Message:
        if message.key is None:
            return message
        self._values.add(message.key)
        return msgspec.structs.replace(message, key=REDACTED)

    def require_found(self, *wanted: Iterable[str]) -> None:
        for names in wanted:
            for name in names:
                if name not in self._found:
                    raise InvalidArgument(f"no message has {name!r}", did_you_mean(name, sorted(self._names)))

    def from_text(self, text: str | None) -> str | None:
        for value in sorted(self._values, key=len, reverse=True):
            if text is not None and len(value) >= QUOTED:
                text = text.replace(value, REDACTED)
        return text

    def _without(self, value: Any, path: str, parts: list[str], before: str = "") -> Any:
        if isinstance(value, list):
            return [self._without(item, path, parts, before) for item in value]
        if not isinstance(value, Mapping):
            return value
        self._names.update(f"{before}{name}" for name in value)
        name, rest = parts[0], parts[1:]
        if name not in value:
            return value
        if rest:
            inner = self._without(value[name], path, rest, f"{before}{name}.")
            return {**value, name: inner}
        self._found.add(path)
        self._remember(value[name])
        return {**value, name: _like(value[name])}

    def _remember(self, value: Any) -> None:
        if isinstance(value, Mapping | list):
            for item in value.values() if isinstance(value, Mapping) else value:
                self._remember(item)
        elif not isinstance(value, bool) and value is not None:
            self._values.add(str(value))


def _like(value: Any) -> Any:
    """A value of the same type that says nothing."""
    return REDACTED if isinstance(value, str) else None if value is None else type(value)()


def _kind(payload: Any) -> str:
    return "bytes" if isinstance(payload, bytes) else "text" if isinstance(payload, str) else "a JSON value"
