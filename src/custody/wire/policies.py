"""Groups and their policies: as they are sent, and policies as they are answered."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from custody.errors import InvalidPolicy
from custody.plain import plain
from custody.policy import Policy
from custody.routing import Binding
from custody.wire.fields import Duration, Large, NewName, Offset, Positive, Text, Timeout, timed
from custody.wire.requests import Shape

Share = Annotated[float, Meta(ge=0, le=1)]
Ordering = Literal["none", "key"]
OnDead = Literal["release", "hold"]
DeadLetters = Literal["keep", "topic"]
Fairness = Literal["key", "tenant"]
Kind = Literal["exponential", "linear", "constant"]


class BackoffIn(Shape):
    """How long a failed message waits: `exponential` (the default), `linear` or `constant`."""

    kind: Kind | UnsetType = UNSET
    initial: Duration | UnsetType = UNSET
    cap: Duration | UnsetType = UNSET
    jitter: Share | UnsetType = UNSET
    multiplier: Annotated[float, Meta(ge=1, le=1000)] | UnsetType = UNSET


class BreakerIn(Shape):
    """Opens when this share of the outcomes within the window failed; then one message is tried now and then."""

    failure_rate: Annotated[float, Meta(ge=0.01, le=1)] | UnsetType = UNSET
    min_outcomes: Annotated[int, Meta(ge=1, le=1_000_000)] | UnsetType = UNSET
    window: Timeout | UnsetType = UNSET
    probe_after: Timeout | UnsetType = UNSET


class PolicyIn(Shape):
    """The rules of a group; what is left out has its default, or stays as it is. Null is no limit."""

    ordering: Ordering | UnsetType = UNSET
    max_attempts: Positive | UnsetType = UNSET
    backoff: BackoffIn | UnsetType = UNSET
    visibility_timeout: Timeout | UnsetType = UNSET
    handler_timeout: Timeout | UnsetType | None = UNSET
    on_dead: OnDead | UnsetType = UNSET
    dead_letter: DeadLetters | UnsetType = UNSET
    max_in_flight: Large | UnsetType | None = UNSET
    max_ack_holes: Large | UnsetType | None = UNSET
    max_parked: Large | UnsetType | None = UNSET
    breaker: BreakerIn | UnsetType | None = UNSET
    fairness: Fairness | UnsetType | None = UNSET
    tenant_separator: Annotated[str, Meta(min_length=1, max_length=200, pattern=r"^[^\u0000]+$")] | UnsetType = UNSET

    @classmethod
    def of(cls, policy: Policy) -> Self:
        given = plain(policy)
        breaker = None if policy.breaker is None else BreakerIn(**given["breaker"])
        return cls(**{**given, "backoff": BackoffIn(**given["backoff"]), "breaker": breaker})

    def value(self, before: Policy | None = None) -> Policy:
        """The policy, with what is not given as before, or as by default."""
        try:
            return Policy.from_mapping({**({} if before is None else plain(before)), **_given(self)})
        except InvalidPolicy as error:  # fields that do not fit together
            raise InvalidPolicy(error.message, error.remedy, path="$.policy") from error


def _given(shape: Shape) -> dict[str, Any]:
    found = ((name, getattr(shape, name)) for name in shape.__struct_fields__)
    return {name: _given(value) if isinstance(value, Shape) else value for name, value in found if value is not UNSET}


class BindingIn(Shape):
    """What a group gets: routing keys that fit the pattern, headers with all of these values."""

    pattern: Text | None = None
    headers: dict[Text, Text] | None = None

    @classmethod
    def of(cls, binding: Binding) -> Self:
        return cls(**binding.plain())

    def value(self) -> Binding:
        return Binding(self.pattern, headers=self.headers)


Bindings = list[BindingIn | Text]


class GroupIn(Shape):
    """A group to make. `start` is earliest, latest, an offset, or a time."""

    name: NewName
    policy: PolicyIn | None = None
    start: Text | Offset = "earliest"
    bare: bool = False
    bindings: Bindings | None = None


class GroupPatch(Shape):
    """Fields of `policy` that are given replace those of the group; `bindings` all of its bindings."""

    policy: PolicyIn | UnsetType = UNSET
    bindings: Bindings | UnsetType | None = UNSET


class BackoffOut(Struct, kw_only=True):
    kind: Kind
    initial: float
    cap: float
    jitter: float
    multiplier: float | UnsetType = UNSET


class BreakerOut(Struct, kw_only=True):
    failure_rate: float
    min_outcomes: int
    window: float
    probe_after: float


class PolicyOut(Struct, kw_only=True):
    """The rules of a group, with durations in seconds. Null is no limit."""

    ordering: Ordering
    max_attempts: int
    backoff: BackoffOut
    visibility_timeout: float
    handler_timeout: float | None
    on_dead: OnDead
    dead_letter: DeadLetters
    max_in_flight: int | None
    max_ack_holes: int | None
    max_parked: int | None
    breaker: BreakerOut | None
    fairness: Fairness | None
    tenant_separator: str

    def value(self) -> Policy:
        return Policy.from_mapping(timed(msgspec.to_builtins(self)))
