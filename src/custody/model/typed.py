"""Typed payloads: values of Python types as plain JSON values, and back. Used by the codec and by `Message.as_`.

Pydantic is optional. It is never imported here: a value or type can only be of pydantic if a program imported it.
"""

from __future__ import annotations

import sys
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from typing import Any, TypeVar, cast
from uuid import UUID

import msgspec

from custody.errors import InvalidArgument, InvalidPayload, PayloadMismatch

T = TypeVar("T")

_PLAIN = (str, int, float, bool, type(None))
_TEXTS = (UUID, datetime, date, time, timedelta, Decimal)
"""Values that are a string in JSON, from which msgspec and pydantic make the same value again."""


def plain_of(value: Any) -> Any:
    """A value as dicts, lists and scalars. Dataclasses, attrs classes, Structs and pydantic models become dicts, enums
    their values; UUIDs, times and Decimals become text.

    Their fields may have any type that msgspec can encode, because the type says how to read them back. Outside of such
    objects, what JSON has no form for is refused.
    """
    if isinstance(value, Enum):
        return plain_of(value.value)
    if isinstance(value, dict):
        if wrong := [name for name in value if not isinstance(name, str)]:
            raise InvalidPayload(f"a key of a JSON object is a string, not {wrong[0]!r}", "Convert it with str().")
        return {name: plain_of(one) for name, one in value.items()}
    if isinstance(value, list):
        return [plain_of(one) for one in value]
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, _TEXTS):
        return msgspec.to_builtins(value)
    if type(value).__module__.startswith("custody."):
        raise InvalidPayload(
            f"the payload is of Custody's own type {type(value).__name__}", "Publish the payload itself."
        )
    if is_typed(type(value)):
        return _lists(msgspec.to_builtins(value, str_keys=True, enc_hook=_dumped))
    if _is_pydantic(type(value)):
        return _dumped(value)
    raise InvalidPayload(
        f"JSON has no form for {type(value).__name__}",
        "Use dicts with string keys, lists, strings, finite numbers, booleans and None, or a dataclass, a Struct or a "
        "pydantic model.",
    )


def is_typed(kind: Any) -> bool:
    """Whether it is a class whose objects msgspec encodes by their fields: a Struct, a dataclass or an attrs class."""
    return isinstance(kind, type) and (
        issubclass(kind, msgspec.Struct) or hasattr(kind, "__dataclass_fields__") or hasattr(kind, "__attrs_attrs__")
    )


def require_type(kind: Any) -> None:
    """Refuses what is not a type that payloads can be decoded as."""
    if _is_pydantic(kind):
        return
    try:
        msgspec.json.Decoder(kind)
    except (TypeError, ValueError, NameError) as error:
        raise InvalidArgument(
            f"payloads cannot be decoded as {kind!r}: {error}",
            "Give a dataclass, a msgspec Struct, a pydantic model, or another type that msgspec decodes.",
        ) from error


def _is_pydantic(kind: Any) -> bool:
    """Whether it is a model of pydantic, or one of its dataclasses."""
    return "pydantic" in sys.modules and isinstance(kind, type) and hasattr(kind, "__pydantic_validator__")


def _dumped(value: Any) -> Any:
    if _is_pydantic(type(value)):
        return value.model_dump(mode="json", by_alias=True)  # a model is read by its aliases
    raise TypeError(f"JSON has no form for {type(value).__name__}")


def _lists(value: Any) -> Any:
    """The value with lists instead of tuples, as it would come back from JSON."""
    if isinstance(value, dict):
        return {name: _lists(one) for name, one in value.items()}
    return [_lists(one) for one in value] if isinstance(value, list | tuple) else value


def typed_as(payload: Any, kind: type[T]) -> T:
    """The payload of a message as a value of a type: by pydantic if it is one of its models, else by msgspec.

    Raises PayloadMismatch, with the path of the field, if it does not fit.
    """
    if type(payload) is kind:
        return payload
    if _is_pydantic(kind):
        return cast(T, _validated(payload, kind))
    try:
        return msgspec.convert(payload, kind, str_keys=True)
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at `")
        raise _mismatch(kind, what, path.removesuffix("`")) from error


def _validated(payload: Any, kind: Any) -> Any:
    import pydantic

    try:
        if isinstance(payload, bytes):
            return pydantic.TypeAdapter(kind).validate_python(payload)
        # as JSON, because strict models accept times and UUIDs as text only there
        return pydantic.TypeAdapter(kind).validate_json(msgspec.json.encode(payload))
    except pydantic.ValidationError as error:
        first, *rest = error.errors(include_url=False, include_context=False, include_input=False)
        path = "$" + "".join(f"[{one}]" if isinstance(one, int) else f".{one}" for one in first["loc"])
        more = f" (and {len(rest)} more)" if rest else ""
        raise _mismatch(kind, first["msg"] + more, path) from error


def _mismatch(kind: Any, what: str, path: str) -> PayloadMismatch:
    where = path or "$"
    name = getattr(kind, "__name__", str(kind))
    return PayloadMismatch(f"the payload does not fit {name}: {where}: {what}", path=where)
