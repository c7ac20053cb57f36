"""Handlers that are ready to use with `pipeline.keyed`: duplicates, and windows of time.

They run in executors, for one message and the state of its key at a time. No timer runs: a window closes when a later
message of the same key shows that its time is over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, cast

from custody.errors import InvalidArgument
from custody.model.entities import Message, Outgoing
from custody.model.outcomes import Dead, Skip
from custody.model.policy import Duration, seconds
from custody.spark.aggregates import Aggregates

OWN_HEADERS = "x-custody-"
"""How the headers begin that Custody adds to a delivery. They are not passed on."""


class Ready:
    """A keyed handler with the type of its state, and for how long the state is kept after its last update."""

    state: Any
    ttl: Duration | None = None

    def __call__(self, message: Message, state: Any) -> object:
        raise NotImplementedError


class dedup(Ready):
    """Passes on the first message of each value of `by`, and drops those that come within `within` after it.

    `by` is a field of the payload, or a function of the message. Duplicates must have the same key. Times are those at
    which messages were published. `then` is a handler of what is passed on; without it, payload and headers are.
    """

    state = dict[str, float]

    def __init__(
        self,
        *,
        by: str | Callable[[Message], object],
        within: Duration,
        then: Callable[[Message], object] | None = None,
    ) -> None:
        self._by = by if callable(by) else field_of(by)
        self._within = _positive(within, "within")
        self.ttl = within
        self._then = then

    def __call__(self, message: Message, state: Any) -> object:
        value, now = str(self._by(message)), message.published_at.timestamp()
        seen = {one: at for one, at in (state.get() or {}).items() if at > now - self._within}
        if value in seen:
            raise Skip(f"a duplicate of {value!r}")
        state.update({**seen, value: now})
        return self._then(message) if self._then is not None else _passed_on(message)


class _Timed(Ready):
    """The event time of a message, and how late one may be."""

    def __init__(
        self, on: str | Callable[[Message], object] | None, late: Duration, aggregate: Mapping[str, str]
    ) -> None:
        self._on = on if on is None or callable(on) else field_of(on)
        self._late = seconds(late)
        self._aggregates = Aggregates(aggregate)

    def _time(self, message: Message) -> float:
        return message.published_at.timestamp() if self._on is None else time_of(self._on(message))

    def _result(self, start: float, end: float, gathered: Any) -> dict[str, Any]:
        return {"start": _text(start), "end": _text(end), **self._aggregates.result(gathered)}


class window(_Timed):
    """Tumbling windows of event time: one output for each window and key, with `start`, `end` and the aggregates.

    `every` is their length, and `on` the field with the time (ISO 8601 with a zone, or seconds since 1970), a function
    of the message, or None for the time of publishing. `aggregate` names the columns: {"pieces": "sum(pieces)", "n":
    "count"}; also min, max, avg and list. A window closes when a message of its key comes whose time is `late` beyond
    its end. A message for a closed window is skipped.
    """

    state = dict[str, Any]

    def __init__(
        self,
        *,
        every: Duration,
        aggregate: Mapping[str, str],
        on: str | Callable[[Message], object] | None = None,
        late: Duration = 0,
    ) -> None:
        super().__init__(on, late, aggregate)
        self._every = _positive(every, "every")

    def __call__(self, message: Message, state: Any) -> object:
        time, known = self._time(message), state.get() or {"newest": None, "open": {}}
        start = time // self._every * self._every
        newest = time if known["newest"] is None else max(time, known["newest"])
        if start + self._every <= newest - self._late:
            raise Skip(f"late: its window ended at {_text(start + self._every)}")
        windows = {float(one): gathered for one, gathered in known["open"].items()}
        windows[start] = self._aggregates.add(windows.get(start), message.payload)
        closed = sorted(one for one in windows if one + self._every <= newest - self._late)
        results = [self._result(one, one + self._every, windows.pop(one)) for one in closed]
        state.update({"newest": newest, "open": {repr(one): gathered for one, gathered in windows.items()}})
        return results


class session(_Timed):
    """Sessions of event time: one output for each, with `start`, `end` and the aggregates.

    A session ends when its key has no message for `gap`; `end` is the time of its last one. It closes when a message of
    its key comes whose time is `gap` and `late` beyond it. A message between two open sessions joins them. A message
    that belongs to a closed session is skipped. The other arguments are those of `window`.
    """

    state = dict[str, Any]

    def __init__(
        self,
        *,
        gap: Duration,
        aggregate: Mapping[str, str],
        on: str | Callable[[Message], object] | None = None,
        late: Duration = 0,
    ) -> None:
        super().__init__(on, late, aggregate)
        self._gap = _positive(gap, "gap")

    def __call__(self, message: Message, state: Any) -> object:
        time, known = self._time(message), state.get() or {"newest": None, "open": []}
        newest = time if known["newest"] is None else max(time, known["newest"])
        start, end, gathered = time, time, self._aggregates.add(None, message.payload)
        others = []
        for other in known["open"]:
            if other[0] - self._gap < time < other[1] + self._gap:
                start, end = min(start, other[0]), max(end, other[1])
                gathered = self._aggregates.join(other[2], gathered)
            else:
                others.append(other)
        if end + self._gap <= newest - self._late:
            raise Skip(f"late: sessions up to {_text(newest - self._late - self._gap)} are closed")
        sessions = sorted([*others, [start, end, gathered]], key=lambda one: cast("float", one[0]))
        closed = [one for one in sessions if one[1] + self._gap <= newest - self._late]
        state.update({"newest": newest, "open": [one for one in sessions if one not in closed]})
        return [self._result(*one) for one in closed]


def field_of(name: str) -> Callable[[Message], object]:
    """A function that gets a field of the payload. A message without it is dead."""

    def get(message: Message) -> object:
        payload = message.payload
        if not isinstance(payload, dict) or payload.get(name) is None:
            raise Dead(f"the payload has no field {name!r}")
        return payload[name]

    return get


def time_of(value: object) -> float:
    """An event time as seconds since 1970. What is no time makes the message dead."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value)
        except ValueError:
            raise Dead(f"{value!r} is no time: write it as in ISO 8601, with a zone") from None
    if not isinstance(value, datetime):
        raise Dead(f"{value!r} is no time: write it as in ISO 8601, with a zone, or as seconds since 1970")
    if value.tzinfo is None:
        raise Dead(f"the time {value.isoformat()} has no zone")
    return value.timestamp()


def _text(time: float) -> str:
    return datetime.fromtimestamp(time, UTC).isoformat()


def _passed_on(message: Message) -> Outgoing:
    headers = {name: value for name, value in message.headers.items() if not name.startswith(OWN_HEADERS)}
    return Outgoing(message.payload, headers=headers or None)


def _positive(given: Duration, what: str) -> float:
    value = seconds(given)
    if value == 0:
        raise InvalidArgument(f"{what} must be longer than zero")
    return value
