"""Policies, retentions and bindings in requests, and policies in answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any, Self

import msgspec

from custody.errors import InvalidArgument, OffsetOutOfRange
from custody.model.limits import LARGEST
from custody.model.policy import Policy
from custody.model.retention import Retention
from custody.model.routing import Binding, bindings_of
from custody.model.start import Start, require_start
from custody.wire.fields import Help, Offset, Sent, Text, When
from custody.wire.requests import Shape
from custody.wire.settings import answered, given


class PolicyIn(given(Policy)):  # type: ignore[misc]  # its fields are those of the policy
    """The policy of a group. A field that is left out has its default, or stays unchanged. Null means no limit."""


class PolicyOut(answered(Policy)):  # type: ignore[misc]  # its fields are those of the policy
    """The policy of a group, with durations in seconds. Null means no limit."""


RetentionIn = given(Retention)
GivenPolicy = Annotated[Policy, Sent(PolicyIn, PolicyIn.of, PolicyIn.value)]
GivenSettings = Annotated[Mapping[str, Any], Sent(PolicyIn, PolicyIn.of, PolicyIn.given)]
"""Settings of a policy by name."""
GivenRetention = Annotated[Retention, Sent(RetentionIn, RetentionIn.of, RetentionIn.value)]


class BindingIn(Shape):
    """Selects messages for a group: those whose routing key matches the pattern and that have all of these headers."""

    pattern: Text | None = None
    headers: dict[Text, Text] | None = None

    @classmethod
    def of(cls, binding: Binding) -> Self:
        return cls(**binding.plain())

    def value(self) -> Binding:
        return Binding(self.pattern, headers=self.headers)


def _sent_bindings(given: Iterable[Binding | str]) -> list[BindingIn]:
    return [BindingIn.of(one) for one in bindings_of(given)]


def _bindings(sent: Sequence[BindingIn | str]) -> list[Binding]:
    found: list[Binding] = []
    for number, one in enumerate(sent):
        try:
            found.append(Binding(one) if isinstance(one, str) else one.value())
        except InvalidArgument as error:
            raise InvalidArgument(error.message, error.remedy, path=f"[{number}]") from error
    return found


GivenBindings = Annotated[Iterable[Binding | str], Sent(list[BindingIn | Text], _sent_bindings, _bindings)]


def _sent_start(start: Start) -> str | int:
    require_start(start)
    if isinstance(start, datetime):
        return start.isoformat()
    if isinstance(start, int):
        if start < 0:
            raise OffsetOutOfRange(f"there is nothing at {start}", "Offsets begin with 0.")
        return min(start, LARGEST)
    return start


def _start(sent: str | int) -> Start:
    if isinstance(sent, int) or sent in ("earliest", "latest"):
        return sent  # type: ignore[return-value]  # a text that is one of the two words
    try:
        return msgspec.convert(sent, When)
    except msgspec.ValidationError:
        raise InvalidArgument(
            f"start cannot be {sent!r}",
            'Give "earliest", "latest", an offset, or a time such as 2026-01-31T12:00:00Z.',
        ) from None


GivenStart = Annotated[
    Start,
    Sent(Text | Offset, _sent_start, _start),
    Help("First message that it receives: earliest, latest, an offset or a time."),
]
