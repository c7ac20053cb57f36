"""What a page answers: a template with values, the way to another page, or a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Page:
    template: str
    values: Mapping[str, Any]
    status: int = 200


@dataclass(frozen=True, kw_only=True)
class Moved:
    """The browser goes to another page. `refresh`: it loads its page as a whole."""

    to: str
    cookie: bytes | None = None
    refresh: bool = False


@dataclass(frozen=True, kw_only=True)
class Download:
    name: str
    """In ASCII, without quotes."""
    body: bytes
    content_type: bytes


Reply = Page | Moved | Download
