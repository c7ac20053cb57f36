"""What windows gather of their messages: counts, sums, extremes, averages and lists of fields, as JSON values."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from custody.errors import InvalidArgument, did_you_mean
from custody.model.outcomes import Dead


class Kind(NamedTuple):
    """How one is made of a value, joined with another one, and shown."""

    first: Callable[[Any], Any]
    join: Callable[[Any, Any], Any]
    shown: Callable[[Any], Any] = lambda one: one


KINDS = {
    "count": Kind(lambda _: 1, lambda a, b: a + b),
    "sum": Kind(lambda value: value, lambda a, b: a + b),
    "min": Kind(lambda value: value, lambda a, b: min(a, b)),
    "max": Kind(lambda value: value, lambda a, b: max(a, b)),
    "avg": Kind(lambda value: [value, 1], lambda a, b: [a[0] + b[0], a[1] + b[1]], lambda one: one[0] / one[1]),
    "list": Kind(lambda value: [value], lambda a, b: [*a, *b]),
}
_WRITTEN = re.compile(r"(\w+)(?:\((\w+|\*)?\))?")
_ANY_VALUE = ("count", "list")


class Aggregates:
    """Named aggregates of the fields of payloads. A message without such a field counts for those that do not need it;
    a sum of no values is null."""

    def __init__(self, aggregate: Mapping[str, str]) -> None:
        given: object = aggregate
        if not isinstance(given, Mapping) or not given:
            raise InvalidArgument("aggregate must name at least one aggregate", 'For example {"total": "sum(amount)"}.')
        self._all = {name: _parsed(text) for name, text in given.items()}
        taken = {"start", "end"} & self._all.keys()
        if taken:
            raise InvalidArgument(f"an aggregate cannot be named {min(taken)!r}", "Each window has this column anyway.")

    def add(self, gathered: dict[str, Any] | None, payload: Any) -> dict[str, Any]:
        """What is gathered, with one more message."""
        fields = payload if isinstance(payload, dict) else {}
        one: dict[str, Any] = {}
        for name, (kind, field) in self._all.items():
            value = True if field is None else fields.get(field)
            if value is None:
                one[name] = None
                continue
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if kind not in _ANY_VALUE and not number:
                raise Dead(f"the field {field!r} is {value!r}, and {kind} needs a number")
            one[name] = KINDS[kind].first(value)
        return one if gathered is None else self.join(gathered, one)

    def join(self, a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
        """What two have gathered together."""
        return {name: self._joined(kind, a[name], b[name]) for name, (kind, _) in self._all.items()}

    def _joined(self, kind: str, a: Any, b: Any) -> Any:
        return b if a is None else a if b is None else KINDS[kind].join(a, b)

    def result(self, gathered: dict[str, Any]) -> dict[str, Any]:
        """The columns of a closed window."""
        found = {}
        for name, (kind, _) in self._all.items():
            value = gathered[name]
            found[name] = KINDS[kind].shown(value) if value is not None else {"count": 0, "list": []}.get(kind)
        return found


def _parsed(text: object) -> tuple[str, str | None]:
    """The kind and the field of an aggregate such as `sum(amount)` or `count`."""
    written = _WRITTEN.fullmatch(text.strip()) if isinstance(text, str) else None
    if written is None:
        raise InvalidArgument(f"{text!r} is no aggregate", 'Write it as "sum(amount)" or "count".')
    kind, field = written[1], None if written[2] == "*" else written[2]
    if kind not in KINDS:
        raise InvalidArgument(f"there is no aggregate {kind!r}", did_you_mean(kind, list(KINDS)))
    if field is None and kind != "count":
        raise InvalidArgument(f"{kind} needs a field", f'Write it as "{kind}(amount)".')
    return kind, field
