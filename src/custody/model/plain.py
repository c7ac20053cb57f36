"""Conversion to JSON values, so that every interface has the same fields."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec

from custody.model.entities import Message, Topic, Waiting
from custody.model.setting import Settings


def plain(value: Any) -> Any:
    """A value as JSON: times in ISO 8601, durations in seconds, bytes as `payload_base64`."""
    if isinstance(value, Settings):
        return value.plain()
    if isinstance(value, Message | Waiting):
        found = {name: plain(getattr(value, name)) for name in value.__struct_fields__ if name != "payload"}
        if isinstance(value.payload, bytes):
            return {**found, "payload_base64": base64.b64encode(value.payload).decode()}
        return {**found, "payload": value.payload}
    if isinstance(value, Topic):
        return {**_fields(value), "message_count": value.message_count, "priorities": value.priorities}
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, UUID | Path):
        return str(value)
    if is_dataclass(value):
        return _fields(value)
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def _fields(value: Any) -> dict[str, Any]:
    return {field.name: plain(getattr(value, field.name)) for field in fields(value)}


def to_json(document: object) -> str:
    return msgspec.json.encode(plain(document)).decode()
