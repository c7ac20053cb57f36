"""A group's rules: order, retries, time-outs, what happens to dead messages, and back-pressure."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime, timedelta
from typing import Any, Literal, Self

from custody.errors import InvalidArgument, InvalidPolicy

Duration = str | int | float | timedelta
"""`"30s"`, `"100ms"`, `"1.5h"`, a number of seconds, or a timedelta."""

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_LONGEST = 100 * 365 * 86400.0  # what can be added to any sensible time without leaving the calendar
_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)?\s*\Z")


def seconds(duration: Duration) -> float:
    """The duration in seconds; refuses what is negative, endless or no duration at all."""
    if isinstance(duration, timedelta):
        value = duration.total_seconds()
    elif isinstance(duration, str):
        match = _DURATION.match(duration)
        if match is None:
            raise InvalidArgument(
                f"{duration!r} is not a duration", 'Write a number with a unit: "100ms", "30s", "5m", "2h" or "1d".'
            )
        value = float(match[1]) * _UNITS[match[2] or "s"]
    else:
        try:
            value = math.nan if isinstance(duration, bool) else float(duration)
        except (TypeError, ValueError, OverflowError):
            value = math.nan
    if not 0 <= value <= _LONGEST:
        raise InvalidArgument(
            f"{duration!r} is not a duration",
            'Give seconds, a timedelta, or a text such as "30s": from zero to a hundred years.',
        )
    return value


def seconds_or_none(duration: Duration | None) -> float | None:
    return None if duration is None else seconds(duration)


def interval(duration: Duration | None) -> timedelta | None:
    """A duration as PostgreSQL takes it."""
    return None if duration is None else timedelta(seconds=seconds(duration))


def require_zone(time: datetime | None) -> None:
    """Refuses a time that means another moment on every machine, and what is no time."""
    given: object = time
    if given is not None and not isinstance(given, datetime):
        raise InvalidArgument(f"{given!r} is not a time", "Use a datetime with a time zone.")
    if time is not None and time.tzinfo is None:
        raise InvalidArgument(f"the time {time} has no time zone", "Use datetime.now(UTC) or the like.")


def did_you_mean(key: str, known: list[str]) -> str:
    """A remedy for an unknown name."""
    close = difflib.get_close_matches(key, known, n=1)
    return f"Did you mean {close[0]!r}?" if close else f"Known are: {', '.join(known)}."


def refuse_unknown(given: Mapping[str, Any], known: list[str], what: str) -> None:
    for key in given:
        if key not in known:
            raise InvalidPolicy(f"{key!r} is not a setting of {what}", did_you_mean(str(key), known))


def _between(name: str, value: object, least: float, most: float) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
        raise InvalidPolicy(f"{name} cannot be {value!r}", f"It is a number between {least} and {most}.")


@dataclass(frozen=True, kw_only=True)
class Backoff:
    """How long a failed message waits before its next attempt. A jitter of 0.2 takes up to 20 % off at random."""

    initial: Duration
    cap: Duration = "30s"
    jitter: float = 0.0

    kind = "constant"
    factor = 1.0

    def __post_init__(self) -> None:
        seconds(self.initial)
        seconds(self.cap)
        _between("jitter", self.jitter, 0, 1)

    def columns(self) -> dict[str, Any]:
        return {
            "backoff_kind": self.kind,
            "backoff_initial": f"{seconds(self.initial)} s",
            "backoff_multiplier": self.factor,
            "backoff_cap": f"{seconds(self.cap)} s",
            "backoff_jitter": self.jitter,
        }


@dataclass(frozen=True)
class Exponential(Backoff):
    """initial, initial × multiplier, initial × multiplier², … up to the cap."""

    initial: Duration = "100ms"
    multiplier: float = field(default=2.0, kw_only=True)

    kind = "exponential"

    def __post_init__(self) -> None:
        super().__post_init__()
        _between("multiplier", self.multiplier, 1, 1000)

    @property
    def factor(self) -> float:  # type: ignore[override]  # a class constant of the others
        return self.multiplier


@dataclass(frozen=True)
class Linear(Backoff):
    """initial, 2 × initial, 3 × initial, … up to the cap."""

    initial: Duration = "1s"

    kind = "linear"


@dataclass(frozen=True)
class Constant(Backoff):
    """Always the same."""

    initial: Duration = "1s"

    kind = "constant"

    def columns(self) -> dict[str, Any]:
        return {**super().columns(), "backoff_cap": f"{max(seconds(self.cap), seconds(self.initial))} s"}


BACKOFFS: dict[str, type[Exponential] | type[Linear] | type[Constant]] = {
    "exponential": Exponential,
    "linear": Linear,
    "constant": Constant,
}


@dataclass(frozen=True, kw_only=True)
class Breaker:
    """A circuit breaker: opens when this share of the last outcomes failed; then one message is tried every so often.

    While it is open nothing is charged, so that an outage downstream does not turn a backlog into dead letters.
    """

    failure_rate: float = 0.5
    min_outcomes: int = 20
    window: Duration = "10s"
    probe_after: Duration = "5s"

    def __post_init__(self) -> None:
        _between("failure_rate", self.failure_rate, 0.01, 1)
        _between("min_outcomes", self.min_outcomes, 1, 1_000_000)
        if not isinstance(self.min_outcomes, int):
            raise InvalidPolicy(f"min_outcomes cannot be {self.min_outcomes!r}", "It is a whole number.")
        if seconds(self.window) == 0 or seconds(self.probe_after) == 0:
            raise InvalidPolicy("the window and probe_after of a breaker must be longer than zero")

    def columns(self) -> dict[str, Any]:
        return {
            "breaker_rate": self.failure_rate,
            "breaker_outcomes": self.min_outcomes,
            "breaker_window": f"{seconds(self.window)} s",
            "breaker_probe": f"{seconds(self.probe_after)} s",
        }


_MOST = {"max_attempts": 2**31 - 1, "max_in_flight": 2**62, "max_ack_holes": 2**62, "max_parked": 2**62}
"""The largest value of each, for the sake of the columns they are stored in."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """The rules of one group. Caps hold for each partition; None means no cap."""

    ordering: Literal["none", "key"] = "none"
    max_attempts: int = 3
    backoff: Backoff = Exponential("100ms")
    visibility_timeout: Duration = "30s"
    handler_timeout: Duration | None = "5m"
    on_dead: Literal["release", "hold"] = "release"
    dead_letter: Literal["keep", "topic"] = "keep"
    max_in_flight: int | None = None
    max_ack_holes: int | None = 10_000
    max_parked: int | None = None
    breaker: Breaker | None = None
    fairness: Literal["key", "tenant"] | None = None
    """Keys, or tenants, are served in turn: one that floods a partition does not hold up the others."""
    tenant_separator: str = ":"
    """The tenant is the part of the key before the first of these."""

    def __post_init__(self) -> None:
        _one_of("ordering", self.ordering, ("none", "key"))
        _one_of("on_dead", self.on_dead, ("release", "hold"))
        _one_of("dead_letter", self.dead_letter, ("keep", "topic"))
        if not isinstance(self.backoff, Backoff):
            raise InvalidPolicy(f"backoff cannot be {self.backoff!r}", "Use Exponential, Linear or Constant.")
        if self.on_dead == "hold" and self.ordering != "key":
            raise InvalidPolicy('on_dead="hold" holds a key and needs ordering="key"')
        if self.fairness is not None:
            _one_of("fairness", self.fairness, ("key", "tenant"))
            if self.ordering != "key":
                raise InvalidPolicy(
                    "fairness parks messages behind their key, in order",
                    'Set ordering="key" too, or leave fairness out.',
                )
        separator: object = self.tenant_separator
        if not isinstance(separator, str) or not separator or "\0" in separator:
            raise InvalidPolicy(f"tenant_separator cannot be {separator!r}", "It is a text such as ':'.")
        if self.breaker is not None and not isinstance(self.breaker, Breaker):
            raise InvalidPolicy(f"breaker cannot be {self.breaker!r}", "Use a Breaker, or None.")
        for name, most in _MOST.items():
            value = getattr(self, name)
            if value is None and name != "max_attempts":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
                raise InvalidPolicy(f"{name} cannot be {value!r}", f"It is a whole number from 1 to {most:,}.")
        for name in ("visibility_timeout", "handler_timeout"):
            value = getattr(self, name)
            if (value is not None or name == "visibility_timeout") and seconds(value) < 0.001:
                raise InvalidPolicy(f"{name} cannot be {value!r}", "It is at least a millisecond.")

    @classmethod
    def from_mapping(cls, given: Mapping[str, Any]) -> Self:
        """From plain values, as they come from JSON or YAML: `backoff` is a mapping with a `kind`."""
        refuse_unknown(given, [f.name for f in fields(cls)], "a policy")
        values = dict(given)
        backoff = values.get("backoff")
        if isinstance(backoff, Mapping):
            settings = dict(backoff)
            kind = settings.pop("kind", "exponential")
            if not isinstance(kind, str) or kind not in BACKOFFS:
                raise InvalidPolicy(f"{kind!r} is not a kind of backoff", did_you_mean(str(kind), list(BACKOFFS)))
            refuse_unknown(settings, [f.name for f in fields(BACKOFFS[kind])], f"the {kind} backoff")
            values["backoff"] = BACKOFFS[kind](**settings)
        breaker = values.get("breaker")
        if isinstance(breaker, Mapping):
            refuse_unknown(breaker, [f.name for f in fields(Breaker)], "a breaker")
            values["breaker"] = Breaker(**breaker)
        return cls(**values)

    def columns(self) -> dict[str, Any]:
        """The policy as the columns of its group."""
        return {
            "ordering": self.ordering,
            "max_attempts": self.max_attempts,
            **self.backoff.columns(),
            "visibility_timeout": f"{seconds(self.visibility_timeout)} s",
            "handler_timeout": None if self.handler_timeout is None else f"{seconds(self.handler_timeout)} s",
            "on_dead": self.on_dead,
            "dead_letter": self.dead_letter,
            "max_in_flight": self.max_in_flight,
            "max_ack_holes": self.max_ack_holes,
            "max_parked": self.max_parked,
            "fairness": self.fairness,
            "tenant_separator": self.tenant_separator,
            **({"breaker_rate": None} if self.breaker is None else self.breaker.columns()),
        }

    @classmethod
    def from_columns(cls, row: Mapping[str, Any]) -> Self:
        """The policy of a group's row."""
        common = {"initial": row["backoff_initial"], "cap": row["backoff_cap"], "jitter": row["backoff_jitter"]}
        if row["backoff_kind"] == "exponential":
            common["multiplier"] = row["backoff_multiplier"]
        return cls(
            ordering=row["ordering"],
            max_attempts=row["max_attempts"],
            backoff=BACKOFFS[row["backoff_kind"]](**common),
            visibility_timeout=row["visibility_timeout"],
            handler_timeout=row["handler_timeout"],
            on_dead=row["on_dead"],
            dead_letter=row["dead_letter"],
            max_in_flight=row["max_in_flight"],
            max_ack_holes=row["max_ack_holes"],
            max_parked=row["max_parked"],
            fairness=row["fairness"],
            tenant_separator=row["tenant_separator"],
            breaker=None
            if row["breaker_rate"] is None
            else Breaker(
                failure_rate=row["breaker_rate"],
                min_outcomes=row["breaker_outcomes"],
                window=row["breaker_window"],
                probe_after=row["breaker_probe"],
            ),
        )


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise InvalidPolicy(f"{name} cannot be {value!r}", f"It is one of: {', '.join(allowed)}.")
