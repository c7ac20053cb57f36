"""Settings: each field of a policy, a backoff, a breaker or a retention declares its type, bounds and meaning once.

It does so in its annotation: `Annotated[int, Meta(ge=1, description="…")]`. The checks, the columns of the database,
the JSON, the options of the command line, OpenAPI and the tables of the docs are derived from that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from datetime import timedelta
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, Self, Union, get_args, get_origin, get_type_hints

from msgspec import Meta

from custody.errors import InvalidArgument, did_you_mean

READERS: dict[Any, Callable[[Any], Any]] = {}
"""Parsers of types that can be written in several ways: durations, sizes."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One field: `kind` is its type without None, `meta` has its bounds and its description."""

    name: str
    kind: Any
    optional: bool
    meta: Meta
    default: Any

    @property
    def help(self) -> str:
        return self.meta.description or ""

    @property
    def choices(self) -> tuple[str, ...]:
        return get_args(self.kind) if get_origin(self.kind) is Literal else ()

    @property
    def nested(self) -> type[Settings] | None:
        return self.kind if isinstance(self.kind, type) and issubclass(self.kind, Settings) else None

    @property
    def column(self) -> str:
        """The name of its column in the database."""
        return str((self.meta.extra or {}).get("column", self.name))

    def read(self, value: Any, refusal: type[InvalidArgument]) -> Any:
        """The value, parsed. One of another type or out of bounds is refused."""
        if value is None and self.optional:
            return None
        remedy = self._misfit(value)
        if remedy is None and self.kind in READERS:
            value = READERS[self.kind](value)
            least = self.meta.ge
            if isinstance(value, timedelta) and least is not None and value.total_seconds() < least:
                remedy = "It is at least a millisecond."
        if remedy is not None:
            raise refusal(f"{self.name} cannot be {value!r}", remedy)
        return value

    def _misfit(self, value: Any) -> str | None:
        """What the value should be; None if it is valid."""
        least, most = self.meta.ge, self.meta.le
        if self.choices:
            return None if value in self.choices else f"It is one of: {', '.join(self.choices)}."
        if self.kind is bool:
            return None if isinstance(value, bool) else "It is true or false."
        if self.kind in (int, float):
            number = isinstance(value, int | self.kind) and not isinstance(value, bool)
            what = "whole number" if self.kind is int else "number"
            fits = number and least is not None and most is not None and least <= value <= most
            return None if fits else f"It is a {what} from {least:,} to {most:,}."
        if self.kind is str:
            longest = self.meta.max_length or 0
            fits = isinstance(value, str) and 0 < len(value) <= longest and "\0" not in value
            return None if fits else f"It is a string of 1 to {longest} characters, without NUL."
        if self.nested is not None:
            return None if isinstance(value, self.nested) else f"Use {self.nested.remedy}."
        return None


_found: dict[type, tuple[Setting, ...]] = {}


def settings_of(kind: type[Settings]) -> tuple[Setting, ...]:
    if kind not in _found:
        hints = get_type_hints(kind, include_extras=True)
        _found[kind] = tuple(_setting(field, hints[field.name]) for field in fields(kind))  # type: ignore[arg-type]  # a dataclass
    return _found[kind]


def _setting(field: Field[Any], hint: Any) -> Setting:
    kind, meta = get_args(hint)[:2] if get_origin(hint) is Annotated else (hint, Meta())
    types = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    optional = type(None) in types
    if optional:
        kind = Union[tuple(one for one in types if one is not type(None))]  # noqa: UP007  # made of a list
    default = None if field.default is MISSING else field.default
    return Setting(name=field.name, kind=kind, optional=optional, meta=meta, default=default)


class Settings:
    """A frozen dataclass of settings. Durations are stored as timedelta, sizes in bytes, however they were written."""

    what: ClassVar[str]
    remedy: ClassVar[str]
    """What to use, in the error about a value of another type."""
    refusal: ClassVar[type[InvalidArgument]] = InvalidArgument

    def __post_init__(self) -> None:
        for setting in settings_of(type(self)):
            value = setting.read(getattr(self, setting.name), self.refusal)
            object.__setattr__(self, setting.name, value)

    @classmethod
    def from_mapping(cls, given: Mapping[str, Any]) -> Self:
        """From plain values, as in JSON or YAML."""
        known = {setting.name: setting.nested for setting in settings_of(cls)}
        values = {}
        for name, value in given.items():
            if name not in known:
                raise cls.refusal(f"{name!r} is not a setting of {cls.what}", did_you_mean(str(name), list(known)))
            nested = known[name]
            values[name] = nested.from_mapping(value) if nested and isinstance(value, Mapping) else value
        return cls(**values)

    def plain(self) -> dict[str, Any]:
        """As JSON: durations in seconds, sizes in bytes."""
        return {setting.name: _plain(getattr(self, setting.name)) for setting in settings_of(type(self))}

    def columns(self) -> dict[str, Any]:
        """As the columns of the database."""
        found: dict[str, Any] = {}
        for setting in settings_of(type(self)):
            value = getattr(self, setting.name)
            if isinstance(value, Settings):
                found |= value.columns()
            elif setting.nested is not None:
                found[settings_of(setting.nested)[0].column] = None
            else:
                found[setting.column] = f"{value.total_seconds()} s" if isinstance(value, timedelta) else value
        return found

    @classmethod
    def from_columns(cls, row: Mapping[str, Any]) -> Self | None:
        """From a row. None if the first column is null, which means that the row has none."""
        settings = settings_of(cls)
        if row[settings[0].column] is None:
            return None
        return cls(**{one.name: one.nested.from_columns(row) if one.nested else row[one.column] for one in settings})


def _plain(value: Any) -> Any:
    if isinstance(value, Settings):
        return value.plain()
    return value.total_seconds() if isinstance(value, timedelta) else value
