"""A group's rules: order, retries, time-outs, what happens to dead messages, and back-pressure."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Annotated, Any, Literal, Self

from msgspec import Meta

from custody.errors import InvalidArgument, InvalidPolicy, did_you_mean
from custody.model.setting import READERS, Settings, settings_of

Duration = str | int | float | timedelta
"""`"30s"`, `"100ms"`, `"1.5h"`, a number of seconds, or a timedelta."""

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
LONGEST = 100 * 365 * 86400.0  # what can be added to any sensible time without leaving the calendar
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
    if not 0 <= value <= LONGEST:
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


READERS[Duration] = lambda given: timedelta(seconds=seconds(given))

Wait = Annotated[Duration, Meta(ge=0, description="How long the first wait is.")]


@dataclass(frozen=True, kw_only=True)
class Backoff(Settings):
    """How long a failed message waits before its next attempt. A jitter of 0.2 takes up to 20 % off at random."""

    initial: Wait
    cap: Annotated[Duration, Meta(ge=0, description="The longest wait.")] = "30s"
    jitter: Annotated[float, Meta(ge=0, le=1, description="Up to this share is taken off at random.")] = 0.0

    kind = "constant"
    factor = 1.0
    remedy = "Exponential, Linear or Constant"
    refusal = InvalidPolicy

    @classmethod
    def from_mapping(cls, given: Mapping[str, Any]) -> Self:
        """From plain values; their `kind` says which class it is."""
        if cls is not Backoff:
            return super().from_mapping(given)
        settings = dict(given)
        kind = settings.pop("kind", "exponential")
        if not isinstance(kind, str) or kind not in BACKOFFS:
            raise InvalidPolicy(f"{kind!r} is not a kind of backoff", did_you_mean(str(kind), list(BACKOFFS)))
        return BACKOFFS[kind].from_mapping(settings)  # type: ignore[return-value]  # one of its subclasses

    def plain(self) -> dict[str, Any]:
        return {"kind": self.kind, **super().plain()}

    def columns(self) -> dict[str, Any]:
        found = {f"backoff_{name}": value for name, value in super().columns().items()}
        return {"backoff_kind": self.kind, "backoff_multiplier": self.factor, **found}

    @classmethod
    def from_columns(cls, row: Mapping[str, Any]) -> Self:
        kind = BACKOFFS[row["backoff_kind"]]
        return kind(**{setting.name: row[f"backoff_{setting.name}"] for setting in settings_of(kind)})  # type: ignore[return-value]  # one of its subclasses


@dataclass(frozen=True)
class Exponential(Backoff):
    """initial, initial × multiplier, initial × multiplier², … up to the cap."""

    initial: Wait = "100ms"
    multiplier: Annotated[float, Meta(ge=1, le=1000, description="Each wait is so many times the one before.")] = field(
        default=2.0, kw_only=True
    )

    kind = "exponential"
    what = "the exponential backoff"

    @property
    def factor(self) -> float:  # type: ignore[override]  # a class constant of the others
        return self.multiplier


@dataclass(frozen=True)
class Linear(Backoff):
    """initial, 2 × initial, 3 × initial, … up to the cap."""

    initial: Wait = "1s"

    kind = "linear"
    what = "the linear backoff"


@dataclass(frozen=True)
class Constant(Backoff):
    """Always the same; a cap that is shorter does not cut it."""

    initial: Wait = "1s"

    kind = "constant"
    what = "the constant backoff"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "cap", max(self.cap, self.initial))


BACKOFFS: dict[str, type[Exponential] | type[Linear] | type[Constant]] = {
    "exponential": Exponential,
    "linear": Linear,
    "constant": Constant,
}


@dataclass(frozen=True, kw_only=True)
class Breaker(Settings):
    """A circuit breaker: opens when this share of the last outcomes failed; then one message is tried every so often.

    While it is open nothing is charged, so that an outage downstream does not turn a backlog into dead letters.
    """

    failure_rate: Annotated[
        float, Meta(ge=0.01, le=1, description="It opens when this share failed.", extra={"column": "breaker_rate"})
    ] = 0.5
    min_outcomes: Annotated[
        int, Meta(ge=1, le=1_000_000, description="Of so many outcomes.", extra={"column": "breaker_outcomes"})
    ] = 20
    window: Annotated[Duration, Meta(ge=0.001, description="Within this time.", extra={"column": "breaker_window"})] = (
        "10s"
    )
    probe_after: Annotated[
        Duration, Meta(ge=0.001, description="A message is tried every so often.", extra={"column": "breaker_probe"})
    ] = "5s"

    what = "a breaker"
    remedy = "a Breaker, or None"
    refusal = InvalidPolicy


@dataclass(frozen=True, kw_only=True)
class Policy(Settings):
    """The rules of one group. Caps hold for each partition; None means no cap."""

    ordering: Annotated[
        Literal["none", "key"],
        Meta(description="key: messages of one key are handled in their order, whatever fails."),
    ] = "none"
    max_attempts: Annotated[int, Meta(ge=1, le=2**31 - 1, description="Failures after which a message is dead.")] = 3
    backoff: Annotated[
        Backoff, Meta(description="How long a failed message waits: exponential, linear or constant.")
    ] = Exponential("100ms")
    visibility_timeout: Annotated[
        Duration,
        Meta(ge=0.001, description="How long a lease lasts; three times the p99 of your handler is a good value."),
    ] = "30s"
    handler_timeout: Annotated[
        Duration | None, Meta(ge=0.001, description="A handler that takes longer has failed.")
    ] = "5m"
    on_dead: Annotated[
        Literal["release", "hold"], Meta(description="hold: the key of a dead message waits for an operator.")
    ] = "release"
    dead_letter: Annotated[
        Literal["keep", "topic"], Meta(description="topic: a dead message also leaves a copy in TOPIC-dlq.")
    ] = "keep"
    max_in_flight: Annotated[
        int | None, Meta(ge=1, le=2**62, description="Fresh messages stop at this many leased messages.")
    ] = None
    max_ack_holes: Annotated[
        int | None,
        Meta(ge=1, le=2**62, description="Fresh messages stop at this many gaps among resolved offsets."),
    ] = 10_000
    max_parked: Annotated[
        int | None, Meta(ge=1, le=2**62, description="Fresh messages stop at this many that wait behind blocked keys.")
    ] = None
    breaker: Annotated[
        Breaker | None, Meta(description="A circuit breaker, which stops a group while most of its messages fail.")
    ] = None
    fairness: Annotated[
        Literal["key", "tenant"] | None,
        Meta(description="Keys, or tenants, are served in turn, however much one publishes. It needs ordering by key."),
    ] = None
    tenant_separator: Annotated[
        str,
        Meta(
            min_length=1,
            max_length=200,
            pattern=r"^[^\u0000]+$",
            description="The tenant is the part of a key before the first of these.",
        ),
    ] = ":"

    what = "a policy"
    refusal = InvalidPolicy

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.on_dead == "hold" and self.ordering != "key":
            raise InvalidPolicy('on_dead="hold" holds a key and needs ordering="key"')
        if self.fairness is not None and self.ordering != "key":
            raise InvalidPolicy(
                "fairness parks messages behind their key, in order", 'Set ordering="key" too, or leave fairness out.'
            )
