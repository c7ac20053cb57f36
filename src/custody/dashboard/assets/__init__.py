"""Styles, scripts and the icon of the dashboard. Browsers may keep them: the path has a digest of the content."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib import resources

LASTING = (b"cache-control", b"public, max-age=31536000, immutable")
_TYPES = {
    "dashboard.css": b"text/css; charset=utf-8",
    "dashboard.js": b"text/javascript; charset=utf-8",
    "htmx.min.js": b"text/javascript; charset=utf-8",
    "icon.svg": b"image/svg+xml",
}


@dataclass(frozen=True, kw_only=True)
class Asset:
    path: str
    body: bytes
    content_type: bytes


@cache
def _all() -> dict[str, Asset]:
    found = {}
    for name, kind in _TYPES.items():
        body = resources.files(__name__).joinpath(name).read_bytes()
        path = f"/ui/assets/{hashlib.sha256(body).hexdigest()[:12]}/{name}"
        found[name] = Asset(path=path, body=body, content_type=kind)
    return found


def path_of(name: str) -> str:
    return _all()[name].path


def find(path: str) -> Asset | None:
    """The asset with this path; one whose content has changed since has another path."""
    return next((one for one in _all().values() if one.path == path), None) if path.startswith("/ui/assets/") else None
