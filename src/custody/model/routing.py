"""Routing: the routing key of a message, and the bindings of a group (patterns and header conditions)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from custody.errors import InvalidArgument, InvalidPayload

ROUTING_KEY = "x-custody-routing-key"
"""The header that holds it."""
LONGEST = 1000
_MOST_SEGMENTS = 32
_MOST_CONDITIONS = 20


def require_routing_key(key: object) -> None:
    """Refuses an invalid routing key. It has segments between dots, none of them empty, without `*`, `>` or NUL."""
    if not isinstance(key, str):
        raise InvalidPayload(f"a routing key is text, not {key!r}", "Convert it, for example with str().")
    if len(key) > LONGEST or "" in key.split(".") or any(sign in key for sign in "*>\0"):
        raise InvalidPayload(
            f"{key[:100]!r} is not a routing key",
            f"Write segments between dots, none of them empty, without * and >, up to {LONGEST} characters.",
        )


@dataclass(frozen=True)
class Binding:
    """A group receives messages whose routing key matches the pattern and whose headers have all of these values.

    In a pattern `*` is one segment and `>`, at the end, one or more. Without a pattern the headers alone decide.
    """

    pattern: str | None = None
    headers: Mapping[str, str] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "headers", dict(self.headers) if self.headers else None)
        if self.pattern is None and self.headers is None:
            raise InvalidArgument(
                "a binding needs a pattern or headers", "Give one, or no bindings to receive every message."
            )
        if self.pattern is not None:
            _require_pattern(self.pattern)
        if len(self.headers or {}) > _MOST_CONDITIONS:
            raise InvalidArgument(
                f"a binding has {len(self.headers or {})} header conditions: at most {_MOST_CONDITIONS} are possible",
                "Use fewer, for example one header that combines several.",
            )
        pairs: Iterable[tuple[object, object]] = (self.headers or {}).items()
        for name, value in pairs:
            if not isinstance(name, str) or not isinstance(value, str) or "\0" in name + value:
                raise InvalidArgument(
                    f"a condition on header {name!r} cannot be {value!r}", "Names and values of headers are strings."
                )

    def __hash__(self) -> int:
        return hash((self.pattern, frozenset((self.headers or {}).items())))

    def __str__(self) -> str:
        conditions = [f"{name}={value}" for name, value in (self.headers or {}).items()]
        return " and ".join(([] if self.pattern is None else [self.pattern]) + conditions)

    def matches(self, headers: Mapping[str, str]) -> bool:
        """Whether a message with these headers, which include its routing key, matches."""
        if any(headers.get(name) != value for name, value in (self.headers or {}).items()):
            return False
        key = headers.get(ROUTING_KEY)
        return self.pattern is None or (key is not None and _expression(self.pattern).fullmatch(key) is not None)

    def plain(self) -> dict[str, Any]:
        """As a JSON value."""
        given = {"pattern": self.pattern, "headers": self.headers}
        return {name: value for name, value in given.items() if value is not None}


def bindings_of(given: Iterable[Binding | str] | None) -> tuple[Binding, ...]:
    """The bindings; a plain string is a pattern. No bindings mean every message."""
    if isinstance(given, str | Binding):
        given = (given,)
    return tuple(one if isinstance(one, Binding) else Binding(one) for one in given or ())


def _require_pattern(pattern: object) -> None:
    if not isinstance(pattern, str):
        raise InvalidArgument(f"a pattern is a string, not {pattern!r}")
    segments = pattern.split(".")
    if len(pattern) > LONGEST or "" in segments or "\0" in pattern or len(segments) > _MOST_SEGMENTS:
        raise InvalidArgument(
            f"{pattern[:100]!r} is not a pattern",
            f"Write up to {LONGEST} characters in up to {_MOST_SEGMENTS} segments between dots, none of them empty; "
            "> at the end stands for all that follow.",
        )
    if any(sign in one and one != sign for one in segments for sign in "*>") or ">" in segments[:-1]:
        raise InvalidArgument(
            f"{pattern!r} is not a pattern",
            "* matches one whole segment, and > as the last segment matches the rest: orders.*.created, orders.>",
        )


def _expression(pattern: str) -> re.Pattern[str]:
    wild = {"*": "[^.]+", ">": "[^.]+(?:[.][^.]+)*"}
    return re.compile("[.]".join(wild.get(one, re.escape(one)) for one in pattern.split(".")))
