"""API keys: who may call a server, with which rights. A key is shown once; the database stores only its digest."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from custody.errors import InvalidArgument
from custody.model.limits import NAME_LENGTH

_ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789"
_KEY = re.compile(rb"cus_([a-z0-9]{12})_[A-Za-z0-9_-]{43}\Z")
_PATTERN = re.compile(rf"[A-Za-z0-9._*?-]{{1,{NAME_LENGTH}}}\Z")
_NOBODYS = bytes(32)


@dataclass(frozen=True, kw_only=True)
class ApiKey:
    """A key without its secret. Each right is a list of patterns of topics."""

    key_id: str
    name: str
    produce: tuple[str, ...]
    consume: tuple[str, ...]
    admin: tuple[str, ...]
    created_at: datetime
    created_by: str | None
    expires_at: datetime | None
    revoked_at: datetime | None
    revoked_by: str | None
    active: bool
    """Neither revoked nor expired."""


@dataclass(frozen=True, kw_only=True)
class NewKey:
    """A new key. A caller sends the secret, which cannot be read again."""

    key: ApiKey
    secret: str = field(repr=False)


def new_secret() -> tuple[str, str]:
    """The id and the secret of a new key. It has 256 random bits, so that a plain SHA-256 is enough to store it."""
    key_id = "".join(secrets.choice(_ALPHABET) for _ in range(12))
    return key_id, f"cus_{key_id}_{secrets.token_urlsafe(32)}"


def patterns(given: Collection[str]) -> list[str]:
    if isinstance(given, str):
        raise InvalidArgument(f"patterns of topics must be a list, not the text {given!r}", f"Write [{given!r}].")
    for pattern in given:
        if not _PATTERN.match(pattern):
            raise InvalidArgument(
                f"{pattern!r} is not a pattern of topics",
                "Use the characters of topic names, * for any text and ? for one character.",
            )
    return list(dict.fromkeys(given))


def digest_of(secret: bytes) -> bytes:
    return hashlib.sha256(secret).digest()


def key_of(row: dict[str, Any]) -> ApiKey:
    rights = {right: tuple(row[right]) for right in ("produce", "consume", "admin")}
    return ApiKey(**{name: value for name, value in row.items() if name != "digest"} | rights)


class KnownKeys:
    """The keys as read at one moment, to authenticate callers without a database call."""

    def __init__(self, keys: Iterable[tuple[bytes, ApiKey]] = (), *, revoked: bool = False) -> None:
        self._keys = {key.key_id.encode(): (digest, key) for digest, key in keys}
        self.all_revoked = revoked and not self._keys
        """There were keys, and all of them are revoked."""

    def __bool__(self) -> bool:
        """Whether there are keys, including expired ones: a server must not open because a key expires."""
        return bool(self._keys)

    @property
    def active(self) -> int:
        return sum(key.active for _, key in self._keys.values())

    def find(self, shown: bytes) -> ApiKey | None:
        """The active key with this secret. It is looked up by its id, which is not secret, and compared in constant
        time."""
        matched = _KEY.match(shown)
        digest, key = self._keys.get(matched[1], (_NOBODYS, None)) if matched is not None else (_NOBODYS, None)
        if hmac.compare_digest(digest_of(shown), digest) and key is not None and key.active:
            return key
        return None
