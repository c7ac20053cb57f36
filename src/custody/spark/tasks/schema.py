"""Checks payloads against the schema of a pipeline before a message reaches the handler or frame.

Runs in executors, without Spark: the schema is the `jsonValue()` of a StructType. Types that JSON lacks (timestamps,
decimals, binary) are not checked here; Spark parses them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypedDict

import msgspec

from custody.errors import InvalidPayload
from custody.model import codec

_INTEGERS = {"byte": 2**7, "short": 2**15, "integer": 2**31, "long": 2**63}
_PLAIN: dict[str, Any] = {"string": str, "boolean": bool, "double": float, "float": float}


def checker(schema: Mapping[str, Any]) -> Callable[[str, bytes], dict[str, Any]]:
    """A function that refuses a payload (kind, bytes) that does not fit the schema. Returns the fields that it has."""
    decode = msgspec.json.Decoder(_type(schema)).decode

    def check(kind: str, payload: bytes) -> dict[str, Any]:
        if kind != "j":
            raise InvalidPayload(f"the payload is {'text' if kind == 't' else 'bytes'}, not a JSON object")
        try:
            found: dict[str, Any] = decode(payload)
        except msgspec.DecodeError as error:
            raise InvalidPayload(f"the payload does not fit the schema: {error}") from None
        return found

    return check


def decoder(schema: Mapping[str, Any]) -> Callable[[str, bytes], dict[str, Any]]:
    """A function that turns a payload (kind, bytes) into the schema's fields, and refuses one that does not fit."""
    names, check = [field["name"] for field in schema["fields"]], checker(schema)

    def fields(kind: str, payload: bytes) -> dict[str, Any]:
        found = check(kind, payload)
        return {name: found.get(name) for name in names}

    return fields


def plain(kind: str, payload: bytes) -> Any:
    """The payload of a pipeline without a schema."""
    try:
        return codec.decode(kind, payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidPayload(f"the payload is not of its declared kind: {error}") from None


def _type(kind: Any) -> Any:
    """The msgspec type for a Spark type, given as `DataType.jsonValue`. Any field may be missing or null."""
    if isinstance(kind, str):
        if kind in _INTEGERS:
            bound = _INTEGERS[kind]
            return Annotated[int, msgspec.Meta(ge=-bound, le=bound - 1)]
        return _PLAIN.get(kind, Any)
    if kind["type"] == "struct":
        fields = {field["name"]: _type(field["type"]) | None for field in kind["fields"]}
        return TypedDict("Fields", fields, total=False)  # type: ignore[operator]
    if kind["type"] == "array":
        return list[_type(kind["elementType"]) | None]  # type: ignore[misc]
    if kind["type"] == "map" and kind["keyType"] == "string":
        return dict[str, _type(kind["valueType"]) | None]  # type: ignore[misc]
    return Any
