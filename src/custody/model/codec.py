"""How a message is stored: the kind and bytes of its payload, its headers as JSON, and what is refused as a key."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from uuid import UUID

import msgspec

from custody.errors import InvalidArgument, InvalidPayload, key_too_long
from custody.model import bounds
from custody.model.entities import KEY_BYTES, Outgoing, Payload
from custody.model.lanes import lane_of
from custody.model.routing import ROUTING_KEY, require_routing_key

KINDS = {"json": "j", "text": "t", "bytes": "b"}
"""The kinds of payloads by their names in views, and as they are stored."""

_encode_json = msgspec.json.Encoder().encode
_decode_json = msgspec.json.Decoder().decode


def encode(payload: Payload) -> tuple[bytes, bytes]:
    """The kind and the bytes of a payload. Refuses what would come back as something else: NaN, tuples, datetimes …"""
    if type(payload) is bytes:
        return b"b", payload
    if type(payload) is msgspec.Raw:
        return _encode_raw(bytes(payload))
    if isinstance(payload, bytes | bytearray | memoryview):
        return b"b", bytes(payload)
    try:
        if isinstance(payload, str):
            return b"t", payload.encode()
        data = _encode_json(payload)
        if _decode_json(data) == payload:
            return b"j", data
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise InvalidPayload(
            f"the payload cannot be stored: {error}", "Give bytes, text, or a plain JSON value."
        ) from error
    raise InvalidPayload(
        "the payload would not come back as it went in",
        "JSON knows dicts with text keys, lists, text, finite numbers, booleans and None. Convert all else.",
    )


def _encode_raw(document: bytes) -> tuple[bytes, bytes]:
    """A JSON document as it came: it is stored letter for letter, once it is known to be one. A text is a text."""
    try:
        value = _decode_json(document)
        return (b"t", value.encode()) if isinstance(value, str) else (b"j", document)
    except (ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise InvalidPayload(f"the payload is not JSON: {error}") from error


def decode_raw(kind: str, data: bytes) -> Payload:
    """As `decode`, but JSON stays what it is, for whoever passes it on."""
    return msgspec.Raw(data) if kind == "j" else decode(kind, data)


def decode(kind: str, data: bytes) -> Payload:
    if kind == "j":
        return _decode_json(data)
    return data if kind == "b" else data.decode()


Decoding = Callable[[str, bytes], Payload]
"""How the kind and the bytes of a payload become one."""


def encode_headers(headers: Mapping[str, str] | None) -> bytes | None:
    if headers is None:
        return None
    if not isinstance(headers, Mapping):
        raise InvalidPayload(f"headers cannot be {headers!r}", "They are a dict of texts by name.")
    if not headers:
        return None
    pairs: Iterable[tuple[object, object]] = headers.items()
    for name, value in pairs:
        if not isinstance(name, str) or not isinstance(value, str):
            raise InvalidPayload(
                f"header {name!r} is {value!r}", "Headers are text by name; convert the value to text."
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
            f"{what} has half a surrogate pair, which is no character", "Decode the text with the right encoding."
        ) from None


Encoded = tuple[str | None, bytes, bytes, bytes | None]
"""key, kind, payload, headers (JSON) of one message."""


def require_key(key: str | None) -> None:
    """Refuses a key that could not be stored."""
    if key is not None:
        if not isinstance(key, str):
            raise InvalidPayload(f"a key is text, not {key!r}", "Convert it, for example with str().")
        if "\0" in key:
            raise InvalidPayload("a key cannot have a NUL character", "Remove it, or encode the key, say as base64.")
        _refuse_surrogates("the key", key)
        if len(key.encode()) > KEY_BYTES:
            raise key_too_long()


def encode_message(message: Outgoing) -> Encoded:
    key = message.key
    require_key(key)
    if message.partition is not None:
        bounds.require("partition", message.partition)
    if message.priority is not None:
        lane_of(message.priority)  # refuses what is none
    kind, payload = encode(message.payload)
    if message.routing_key is not None:
        require_routing_key(message.routing_key)
        return key, kind, payload, encode_headers({**(message.headers or {}), ROUTING_KEY: message.routing_key})
    return key, kind, payload, encode_headers(message.headers)


def encode_event(event_id: UUID, replays: int, message: Outgoing) -> Encoded:
    """An event of an outbox elsewhere. What it cannot say of its message is refused, rather than left out."""
    if not isinstance(event_id, UUID):
        raise InvalidArgument(f"event_id cannot be {event_id!r}", "It is a UUID.")
    bounds.require("replays", replays)
    for name in ("partition", "priority", "delay", "deliver_at"):
        if getattr(message, name) is not None:
            raise InvalidArgument(
                f"an event of an outbox cannot name a {name}", "Its key says where it goes, and it goes at once."
            )
    return encode_message(message)


def arrays(encoded: Sequence[Encoded]) -> dict[str, Any]:
    """The columns of many messages, as the functions take them."""
    return {
        "keys": [key for key, _, _, _ in encoded],
        "kinds": [kind.decode() for _, kind, _, _ in encoded],
        "payloads": [payload for _, _, payload, _ in encoded],
        "headers": [None if headers is None else headers.decode() for _, _, _, headers in encoded],
    }
