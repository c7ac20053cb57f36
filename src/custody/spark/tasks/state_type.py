"""The type of the state that a keyed handler keeps for each key, and its JSON. Imports no Spark."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, get_args, get_type_hints

import msgspec

from custody.errors import InvalidArgument, InvalidPayload, did_you_mean
from custody.model.policy import Duration, seconds
from custody.model.typed import is_typed
from custody.spark.tasks.schema import decoder

CACHE = "__msgspec_cache__"
MOST = 262_144
"""Bytes of a state as JSON. The table has the same bound."""


@dataclass(frozen=True, kw_only=True)
class StateType:
    """The type of a pipeline's states, and for how many seconds one is kept after its last update."""

    kind: Any
    """A class, another type that msgspec decodes, or the text of a schema as in SQL."""
    ttl: float | None = None
    schema: Mapping[str, Any] | None = None
    """Of a text: `jsonValue()` of the StructType, once a session has parsed it."""

    @property
    def name(self) -> str:
        return self.kind if isinstance(self.kind, str) else getattr(self.kind, "__name__", str(self.kind))

    def parsed(self, schema: Mapping[str, Any]) -> StateType:
        """The same with the parsed schema of its text."""
        return replace(self, schema=schema)

    def codec(self) -> Codec:
        """For a task: it cannot be sent to one."""
        return Codec(self)


class Codec:
    """Converts states to JSON and back, and refuses what does not fit the type."""

    def __init__(self, of: StateType) -> None:
        self._name = of.name
        self._class = of.kind if is_typed(of.kind) else None
        self._decode: Callable[[bytes], Any]
        self._fields: list[str] | None = None
        if isinstance(of.kind, str):
            assert of.schema is not None, "a session has parsed it"
            fields = decoder(of.schema)
            self._fields = [field["name"] for field in of.schema["fields"]]
            self._decode = lambda data: fields("j", data)
        else:
            self._decode = msgspec.json.Decoder(of.kind).decode
        self._encode = msgspec.json.Encoder().encode

    def decode(self, key: str, data: bytes) -> Any:
        """A new value each time: a handler may change it, and fail afterwards."""
        try:
            return self._decode(data)
        except (msgspec.MsgspecError, InvalidPayload) as error:
            raise InvalidPayload(
                f"the stored state of key {key!r} does not fit {self._name}: {error}",
                "Give new fields a default, or remove the state: custody pipeline state delete.",
            ) from error

    def encode(self, key: str, value: Any) -> bytes:
        """What does not fit, or would come back as something else, is refused before it is stored."""
        if self._class is not None and not isinstance(value, self._class):
            raise self._misfit(key, f"it is of type {type(value).__name__}")
        if self._fields is not None:
            if not isinstance(value, dict):
                raise self._misfit(key, f"it is of type {type(value).__name__}, not a dict")
            for name in value:
                if name not in self._fields:
                    raise self._misfit(key, f"it has a field {name!r}. {did_you_mean(str(name), self._fields)}")
        try:
            data = self._encode(value)
            self._decode(data)
        except (msgspec.MsgspecError, InvalidPayload, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise self._misfit(key, str(error)) from error
        if len(data) > MOST:
            raise InvalidPayload(
                f"the state of key {key!r} would have {len(data):,} bytes; a state has at most {MOST:,}",
                "Keep less of it, or publish what is kept as messages.",
            )
        return data

    def _misfit(self, key: str, why: str) -> InvalidPayload:
        return InvalidPayload(f"the new state of key {key!r} does not fit {self._name}: {why}", "Nothing was changed.")


def forget(kind: Any) -> None:
    """Removes what msgspec keeps in classes that it has decoded: it cannot be pickled with a class of a script."""
    pending, seen = [kind], set()
    while pending:
        one = pending.pop()
        pending += get_args(one)
        if not isinstance(one, type) or one in seen:
            continue
        seen.add(one)
        if CACHE in vars(one):
            delattr(one, CACHE)
            pending += get_type_hints(one).values()


def is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def state_of(kind: Any, ttl: Duration | None) -> StateType:
    """The arguments of `keyed`, checked where the pipeline is defined."""
    if kind is None or (isinstance(kind, str) and not kind.strip()):
        raise InvalidArgument(
            f"the state cannot be {kind!r}", "Give a dataclass, a Struct, or the fields as in SQL: 'total double'."
        )
    if not isinstance(kind, str):
        try:
            msgspec.json.Decoder(kind)
        except (TypeError, ValueError, NameError) as error:
            raise InvalidArgument(
                f"the state cannot be decoded as {kind!r}: {error}",
                "Give a dataclass, a Struct, or the fields as in SQL: 'total double'.",
            ) from error
        forget(kind)
        if is_struct(kind) and (kind.__module__ == "__main__" or "<locals>" in kind.__qualname__):
            raise InvalidArgument(  # pickled by its definition, it loses its fields
                f"the Struct {kind.__name__} is defined in a script or a function, and cannot be sent to executors",
                "Make it a dataclass, or move it to a module that the script imports.",
            )
    kept = None if ttl is None else seconds(ttl)
    if kept == 0:
        raise InvalidArgument("a ttl is more than zero", "Leave it out to keep states until they are cleared.")
    return StateType(kind=kind, ttl=kept)
