"""Input of `custody publish`: reads lines in batches, smaller ones when the input pauses, and parses messages."""

from __future__ import annotations

import base64
import binascii
import os
import select
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

import msgspec

from custody.errors import InvalidPayload, did_you_mean
from custody.model.entities import Outgoing
from custody.model.lanes import Priority

ENVELOPE = [
    *("payload", "payload_base64", "key", "headers", "partition", "delay", "deliver_at"),
    *("priority", "routing_key", "allow_split"),
]
_CHUNK = 1 << 16
_QUIET = 0.1  # seconds without input after which the lines read so far are published

Line = tuple[int, bytes]


def batches(descriptor: int, size: int) -> Iterator[list[Line]]:
    """Batches of the lines of a file or pipe, with their numbers: up to `size`, fewer when the input pauses."""
    number = 0
    rest = b""
    pending: list[Line] = []
    while chunk := os.read(descriptor, _CHUNK):
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            number += 1
            pending.append((number, line))
        while len(pending) >= size:
            yield pending[:size]
            del pending[:size]
        if pending and not select.select([descriptor], [], [], _QUIET)[0]:
            yield pending
            pending = []
    if rest:
        pending.append((number + 1, rest))
    if pending:
        yield pending


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How a line becomes a message."""

    form: Literal["json", "text", "bytes", "envelope"]
    key: str | None = None
    key_field: str | None = None
    headers: dict[str, str] | None = None
    partition: int | None = None
    delay: str | None = None
    deliver_at: datetime | None = None
    priority: Priority | None = None
    routing_key: str | None = None
    allow_split: bool = False

    def messages(self, lines: list[Line]) -> list[Outgoing]:
        """The messages of a batch. Blank lines are skipped, unless payloads are text or bytes."""
        kept = lines if self.form in ("text", "bytes") else [line for line in lines if line[1].strip()]
        return [self.message(line, f"line {number}") for number, line in kept]

    def message(self, line: bytes, where: str) -> Outgoing:
        line = line.removesuffix(b"\r")
        if self.form == "bytes":
            return self._outgoing(line)
        if self.form == "text":
            try:
                return self._outgoing(line.decode())
            except UnicodeDecodeError as error:
                raise InvalidPayload(f"{where} is not UTF-8: {error}", "Use --bytes.") from error
        try:
            value = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidPayload(
                f"{where} is not JSON: {error}", "Quote text as in JSON, or publish it unchanged with --text."
            ) from error
        return (
            self._unwrapped(value, where) if self.form == "envelope" else self._outgoing(value, self._key(value, where))
        )

    def _outgoing(self, payload: Any, key: str | None = None) -> Outgoing:
        return Outgoing(
            payload,
            key=self.key if key is None else key,
            headers=self.headers,
            partition=self.partition,
            delay=self.delay,
            deliver_at=self.deliver_at,
            priority=self.priority,
            routing_key=self.routing_key,
            allow_split=self.allow_split,
        )

    def _key(self, value: Any, where: str) -> str | None:
        if self.key_field is None:
            return None
        if not isinstance(value, dict) or self.key_field not in value:
            known = list(value) if isinstance(value, dict) else []
            raise InvalidPayload(
                f"{where} has no field {self.key_field!r} for the key",
                did_you_mean(self.key_field, known) if known else "--key-field needs JSON objects.",
            )
        key = value[self.key_field]
        return key if key is None or isinstance(key, str) else msgspec.json.encode(key).decode()

    def _unwrapped(self, value: Any, where: str) -> Outgoing:
        if not isinstance(value, dict) or ("payload" in value) == ("payload_base64" in value):
            raise InvalidPayload(f"{where} is not an object with either payload or payload_base64")
        for name in value:
            if name not in ENVELOPE:
                raise InvalidPayload(f"{where} has an unknown field {name!r}", did_you_mean(name, ENVELOPE))
        payload = value.get("payload")
        if "payload_base64" in value:
            try:
                payload = base64.b64decode(value["payload_base64"], validate=True)
            except (TypeError, ValueError, binascii.Error) as error:
                raise InvalidPayload(f"the payload_base64 of {where} is not base64: {error}") from error
        headers, partition = value.get("headers"), value.get("partition")
        if headers is not None and not isinstance(headers, dict):
            raise InvalidPayload(f"the headers of {where} are not an object")
        if partition is not None and type(partition) is not int:
            raise InvalidPayload(f"the partition of {where} is not a whole number")
        key = value.get("key", self._key(payload, where))
        return Outgoing(
            payload,
            key=self.key if key is None else key,
            headers={**(self.headers or {}), **(headers or {})} or None,
            partition=self.partition if partition is None else partition,
            **self._time(value, where),
            priority=value.get("priority", self.priority),
            routing_key=value.get("routing_key", self.routing_key),
            allow_split=value.get("allow_split", self.allow_split) is True,
        )

    def _time(self, value: dict[str, Any], where: str) -> dict[str, Any]:
        """The fields for a delayed delivery, if there are any."""
        delay, at = value.get("delay"), value.get("deliver_at")
        if delay is None and at is None:
            return {"delay": self.delay, "deliver_at": self.deliver_at}
        try:
            return {"delay": delay, "deliver_at": None if at is None else msgspec.convert(at, datetime)}
        except msgspec.ValidationError as error:
            raise InvalidPayload(f"the deliver_at of {where} is not a time: {error}") from error
