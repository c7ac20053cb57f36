"""The JSON of settings: structs made of the fields of a policy and of its nested settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from custody.model import policy, retention
from custody.model.plain import plain
from custody.model.policy import BACKOFFS, Backoff
from custody.model.setting import Setting, Settings, settings_of
from custody.wire import fields
from custody.wire.requests import Shape

_BACKOFF = Setting(
    name="kind", kind=Literal[tuple(BACKOFFS)], optional=False, meta=Meta(description="The class."), default=None
)


class SettingsIn(Shape):
    """Settings in a request: any of them may be left out."""

    settings: ClassVar[type[Settings]]

    @classmethod
    def of(cls, settings: Settings | Mapping[str, Any]) -> Self:
        """Converts all settings, or some by name."""
        try:
            return msgspec.convert(plain(settings), cls, dec_hook=fields.read)
        except msgspec.ValidationError as error:
            raise cls.settings.refusal(str(error)) from error

    def given(self) -> dict[str, Any]:
        """The given settings by name."""
        found: dict[str, Any] = msgspec.to_builtins(self, enc_hook=fields.write)
        return found

    def value(self) -> Any:
        """The settings; those that are left out have their defaults."""
        return self.settings.from_mapping(self.given())


class SettingsOut(Struct):
    """Settings in an answer: all of them, durations in seconds and sizes in bytes."""

    settings: ClassVar[type[Settings]]

    def value(self) -> Any:
        return self.settings.from_mapping(msgspec.to_builtins(self))


def _settings(kind: type[Settings]) -> Iterator[tuple[Setting, bool]]:
    """The settings, and whether each is always present: a backoff has only those of its kind."""
    if kind is not Backoff:
        yield from ((setting, True) for setting in settings_of(kind))
        return
    yield _BACKOFF, True
    common = {setting.name for setting in settings_of(Backoff)}
    found = {setting.name: setting for one in BACKOFFS.values() for setting in settings_of(one)}
    yield from ((setting, name in common) for name, setting in found.items())


def given(kind: type[Settings]) -> type[SettingsIn]:
    """The struct of these settings for requests."""
    found: list[Any] = []
    for setting, _ in _settings(kind):
        types = _sent(setting) | UnsetType | (None if setting.optional else UnsetType)
        found.append((setting.name, Annotated[types, Meta(description=setting.help)], UNSET))
    return _structure(f"{kind.__name__}In", found, SettingsIn, kind)


def answered(kind: type[Settings]) -> type[SettingsOut]:
    """The struct of these settings for answers."""
    found: list[Any] = []
    for setting, always in _settings(kind):
        type_ = _shown(setting)
        types = type_ | None if setting.optional else type_
        found.append((setting.name, types) if always else (setting.name, types | UnsetType, UNSET))
    return _structure(f"{kind.__name__}Out", found, SettingsOut, kind)


def _structure(name: str, found: list[Any], base: type[Any], kind: type[Settings]) -> type[Any]:
    return msgspec.defstruct(
        name, found, bases=(base,), kw_only=True, namespace={"__doc__": kind.__doc__, "settings": kind}
    )


def _sent(setting: Setting) -> Any:
    meta = setting.meta
    if setting.nested is not None:
        return given(setting.nested)
    if setting.kind == policy.Duration:
        return fields.Timeout if meta.ge else fields.Duration
    if setting.kind == retention.Size:
        return fields.Size
    if setting.kind in (int, float):
        return Annotated[setting.kind, Meta(ge=meta.ge, le=meta.le)]
    if setting.kind is str:
        return Annotated[str, Meta(min_length=meta.min_length, max_length=meta.max_length, pattern=meta.pattern)]
    return setting.kind


def _shown(setting: Setting) -> Any:
    if setting.nested is not None:
        return answered(setting.nested)
    return {policy.Duration: float, retention.Size: int}.get(setting.kind, setting.kind)
