"""Encoding of a message: the kind and bytes of its payload, its headers as JSON, and the check of its key."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from uuid import UUID

import msgspec

from custody.errors import InvalidArgument, InvalidPayload, key_too_long
from custody.model import bounds
from custody.model.entities import KEY_BYTES, Outgoing, Payload
from custody.model.lanes import lane_of
from custody.model.routing import ROUTING_KEY, require_routing_key
from custody.model.typed import plain_of

KINDS = {"json": "j", "text": "t", "bytes": "b"}
"""The kinds of payloads: their names in views, and the letters that are stored."""

_encode_json = msgspec.json.Encoder().encode
_decode_json = msgspec.json.Decoder().decode


def encode(payload: Payload) -> tuple[bytes, bytes]:
    """The kind and the bytes of a payload.

    Typed values (`typed.plain_of` has the rules) are stored as plain JSON. What JSON would change is refused: NaN,
    tuples, sets, bytes within a document.
    """
    if type(payload) is bytes:
        return b"b", payload
    if type(payload) is msgspec.Raw:
        return _encode_raw(bytes(payload))
    if isinstance(payload, bytes | bytearray | memoryview):
        return b"b", bytes(payload)
    try:
        if isinstance(payload, str) and not isinstance(payload, Enum):
            return b"t", payload.encode()
        data = _encoded(payload)
        if data is not None:
            return b"j", data
        plain = plain_of(payload)
        if isinstance(plain, str):
            return b"t", plain.encode()
        data = _encoded(plain)
        if data is not None:
            return b"j", data
    except InvalidPayload:
        raise
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise InvalidPayload(
            f"the payload cannot be stored: {error}", "Give bytes, text, a JSON value, or an object with typed fields."
        ) from error
    raise InvalidPayload(
        "JSON would change the payload",
        "Use dicts with string keys, lists, strings, finite numbers, booleans and None. Convert everything else.",
    )


def _encoded(value: Payload) -> bytes | None:
    """The value as JSON; None if something else would come back."""
    try:
        data = _encode_json(value)
    except TypeError:  # of a type that msgspec does not know
        return None
    return data if _decode_json(data) == value else None


def _encode_raw(document: bytes) -> tuple[bytes, bytes]:
    """A JSON document, checked and stored byte for byte. A JSON string becomes a text payload."""
    try:
        value = _decode_json(document)
        return (b"t", value.encode()) if isinstance(value, str) else (b"j", document)
    except (ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise InvalidPayload(f"the payload is not JSON: {error}") from error


def decode_raw(kind: str, data: bytes) -> Payload:
    """As `decode`, but JSON stays undecoded, for callers that pass it on."""
    return msgspec.Raw(data) if kind == "j" else decode(kind, data)


def decode(kind: str, data: bytes) -> Payload:
    if kind == "j":
        return _decode_json(data)
    return data if kind == "b" else data.decode()


Decoding = Callable[[str, bytes], Payload]
"""Turns the kind and the bytes into a payload."""


def encode_headers(headers: Mapping[str, str] | None) -> bytes | None:
    if headers is None:
        return None
    if not isinstance(headers, Mapping):
        raise InvalidPayload(f"headers cannot be {headers!r}", "Give a dict of strings.")
    if not headers:
        return None
    pairs: Iterable[tuple[object, object]] = headers.items()
    for name, value in pairs:
        if not isinstance(name, str) or not isinstance(value, str):
            raise InvalidPayload(
                f"header {name!r} is {value!r}", "Names and values of headers are strings: convert it."
            )
        if "\0" in name or "\0" in value:
            raise InvalidPayload(
                f"header {name!r} has a NUL character", "Remove it, or put the value into the payload."
            )
        _refuse_surrogates(f"header {name!r}", name + value)
        if name == ROUTING_KEY:
            require_routing_key(value)
    return _encode_json(dict(headers))


def _refuse_surrogates(what: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidPayload(
            f"{what} has a lone surrogate, which is not a character", "Decode the text with the right encoding."
        ) from None


Encoded = tuple[str | None, bytes, bytes, bytes | None]
"""key, kind, payload, headers (JSON) of one message."""


def require_key(key: str | None) -> None:
    """Refuses a key that cannot be stored."""
    if key is not None:
        if not isinstance(key, str):
            raise InvalidPayload(f"a key is a string, not {key!r}", "Convert it, for example with str().")
        if "\0" in key:
            raise InvalidPayload(
                "a key cannot have a NUL character", "Remove it, or encode the key, for example as base64."
            )
        _refuse_surrogates("the key", key)
        if len(key.encode()) > KEY_BYTES:
            raise key_too_long()


def encode_message(message: Outgoing) -> Encoded:
    key = message.key
    require_key(key)
    if message.partition is not None:
        bounds.require("partition", message.partition)
    if message.priority is not None:
        lane_of(message.priority)  # refuses an unknown priority
    kind, payload = encode(message.payload)
    if message.routing_key is not None:
        require_routing_key(message.routing_key)
        return key, kind, payload, encode_headers({**(message.headers or {}), ROUTING_KEY: message.routing_key})
    return key, kind, payload, encode_headers(message.headers)


def encode_event(event_id: UUID, replays: int, message: Outgoing) -> Encoded:
    """An event of an outbox in another database. Settings that an event cannot have are refused, not ignored."""
    if not isinstance(event_id, UUID):
        raise InvalidArgument(f"event_id cannot be {event_id!r}", "It is a UUID.")
    bounds.require("replays", replays)
    for name in ("partition", "priority", "delay", "deliver_at"):
        if getattr(message, name) is not None:
            raise InvalidArgument(
                f"an event of an outbox cannot have a {name}",
                "Leave it out: its key decides the partition, and it is not delayed.",
            )
    return encode_message(message)
