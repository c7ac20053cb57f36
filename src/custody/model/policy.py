"""A group's policy: order, retries, timeouts, dead letters and back-pressure."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Annotated, Any, Literal, Self

from msgspec import Meta

from custody.errors import InvalidArgument, InvalidPolicy, did_you_mean
from custody.model.limits import LARGEST, SMALL
from custody.model.setting import READERS, Settings, settings_of

Duration = str | int | float | timedelta
"""`"30s"`, `"100ms"`, `"1.5h"`, a number of seconds, or a timedelta."""

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
LONGEST = 100 * 365 * 86400.0  # a sum of this and a sensible time is still a valid datetime
_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)?\s*\Z")


def seconds(duration: Duration) -> float:
    """The duration in seconds. A negative or infinite one, and what is not a duration, is refused."""
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
            'Give seconds, a timedelta, or a string such as "30s", from zero to a hundred years.',
        )
    return value


def seconds_or_none(duration: Duration | None) -> float | None:
    return None if duration is None else seconds(duration)


def interval(duration: Duration | None) -> timedelta | None:
    """A duration as a parameter for PostgreSQL."""
    return None if duration is None else timedelta(seconds=seconds(duration))


def require_zone(time: datetime | None) -> None:
    """Refuses what is not a datetime, and a datetime without a time zone: it means another moment on each machine."""
    given: object = time
    if given is not None and not isinstance(given, datetime):
        raise InvalidArgument(f"{given!r} is not a time", "Use a datetime with a time zone.")
    if time is not None and time.tzinfo is None:
        raise InvalidArgument(f"the time {time} has no time zone", "Use one with a zone, such as datetime.now(UTC).")


READERS[Duration] = lambda given: timedelta(seconds=seconds(given))

Wait = Annotated[Duration, Meta(ge=0, description="Delay before the first retry.")]


@dataclass(frozen=True, kw_only=True)
class Backoff(Settings):
    """Delay of a failed message before its next attempt. A jitter of 0.2 shortens it at random by up to 20 %."""

    initial: Wait
    cap: Annotated[Duration, Meta(ge=0, description="Longest delay.")] = "30s"
    jitter: Annotated[float, Meta(ge=0, le=1, description="Delays are shortened at random by up to this share.")] = 0.0

    kind = "constant"
    factor = 1.0
    remedy = "Exponential, Linear or Constant"
    refusal = InvalidPolicy

    @classmethod
    def from_mapping(cls, given: Mapping[str, Any]) -> Self:
        """From plain values; `kind` names the subclass."""
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
    multiplier: Annotated[float, Meta(ge=1, le=1000, description="Factor from one delay to the next.")] = field(
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
    """Always `initial`; a shorter cap has no effect."""

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
    """A circuit breaker: opens at this failure rate, and then delivers one message every `probe_after` as a probe.

    While it is open, failures do not count, so that an outage downstream does not turn a backlog into dead letters.
    """

    failure_rate: Annotated[
        float, Meta(ge=0.01, le=1, description="It opens at this share of failures.", extra={"column": "breaker_rate"})
    ] = 0.5
    min_outcomes: Annotated[
        int,
        Meta(
            ge=1,
            le=1_000_000,
            description="It needs at least this many outcomes.",
            extra={"column": "breaker_outcomes"},
        ),
    ] = 20
    window: Annotated[
        Duration, Meta(ge=0.001, description="Outcomes of this time count.", extra={"column": "breaker_window"})
    ] = "10s"
    probe_after: Annotated[
        Duration,
        Meta(ge=0.001, description="Time between two probes while it is open.", extra={"column": "breaker_probe"}),
    ] = "5s"

    what = "a breaker"
    remedy = "a Breaker, or None"
    refusal = InvalidPolicy


@dataclass(frozen=True, kw_only=True)
class Policy(Settings):
    """The settings of one group. Limits apply to each partition; None means no limit."""

    ordering: Annotated[
        Literal["none", "key"],
        Meta(description="key: messages of a key are delivered in order, also through retries."),
    ] = "none"
    max_attempts: Annotated[
        int, Meta(ge=1, le=SMALL, description="Number of failures after which a message is dead.")
    ] = 3
    retry_for: Annotated[
        Duration | None,
        Meta(ge=0.001, description="A message that fails this long after its first failure is dead, too."),
    ] = None
    backoff: Annotated[Backoff, Meta(description="Delay before a retry: exponential, linear or constant.")] = (
        Exponential("100ms")
    )
    visibility_timeout: Annotated[
        Duration,
        Meta(ge=0.001, description="Duration of a lease; three times the p99 of your handler is a good value."),
    ] = "30s"
    handler_timeout: Annotated[
        Duration | None, Meta(ge=0.001, description="A handler that takes longer has failed.")
    ] = "5m"
    on_dead: Annotated[
        Literal["release", "hold"], Meta(description="hold: a dead message blocks its key until an operator acts.")
    ] = "release"
    dead_letter: Annotated[
        Literal["keep", "topic"], Meta(description="topic: a copy of each dead message is published to TOPIC-dlq.")
    ] = "keep"
    max_in_flight: Annotated[
        int | None, Meta(ge=1, le=LARGEST, description="No new messages are delivered while this many are leased.")
    ] = None
    max_ack_holes: Annotated[
        int | None,
        Meta(ge=1, le=LARGEST, description="No new messages are delivered while resolved offsets have this many gaps."),
    ] = 10_000
    max_parked: Annotated[
        int | None,
        Meta(ge=1, le=LARGEST, description="No new messages are delivered while this many wait behind blocked keys."),
    ] = None
    breaker: Annotated[
        Breaker | None, Meta(description="A circuit breaker: stops deliveries while most messages fail.")
    ] = None
    fairness: Annotated[
        Literal["key", "tenant"] | None,
        Meta(description="Serve keys, or tenants, in turn, however much one publishes. Needs ordering by key."),
    ] = None
    tenant_separator: Annotated[
        str,
        Meta(
            min_length=1,
            max_length=200,
            pattern=r"^[^\u0000]+$",
            description="The tenant is the part of the key before the first separator.",
        ),
    ] = ":"

    what = "a policy"
    refusal = InvalidPolicy

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.on_dead == "hold" and self.ordering != "key":
            raise InvalidPolicy('on_dead="hold" needs ordering="key"', 'Set ordering="key" too, or on_dead="release".')
        if self.fairness is not None and self.ordering != "key":
            raise InvalidPolicy(
                f'fairness="{self.fairness}" needs ordering="key"', 'Set ordering="key" too, or leave fairness out.'
            )
