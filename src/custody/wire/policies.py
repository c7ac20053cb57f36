"""Groups and their policies: as they are sent, and policies as they are answered."""

from __future__ import annotations

from typing import Self

import msgspec
from msgspec import UNSET, Struct, UnsetType

from custody.errors import InvalidPolicy
from custody.model.policy import Policy
from custody.model.routing import Binding
from custody.wire import fields
from custody.wire.fields import NewName, Offset, Text
from custody.wire.requests import Shape
from custody.wire.settings import answered, given


class PolicyIn(given(Policy), Shape):  # type: ignore[misc]  # its fields are those of the policy
    """The rules of a group; what is left out has its default, or stays as it is. Null is no limit."""

    @classmethod
    def of(cls, policy: Policy) -> Self:
        return msgspec.convert(policy.plain(), cls, dec_hook=fields.read)

    def value(self, before: Policy | None = None) -> Policy:
        """The policy, with what is not given as before, or as by default."""
        found = msgspec.to_builtins(self, enc_hook=fields.write)
        try:
            return Policy.from_mapping({**({} if before is None else before.plain()), **found})
        except InvalidPolicy as error:  # fields that do not fit together
            raise InvalidPolicy(error.message, error.remedy, path="$.policy") from error


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


class PolicyOut(answered(Policy), Struct):  # type: ignore[misc]  # its fields are those of the policy
    """The rules of a group, with durations in seconds. Null is no limit."""

    def value(self) -> Policy:
        return Policy.from_mapping(msgspec.to_builtins(self))
