"""Web pages: which may call, and what a browser is told about it (CORS). Programs send none of these headers."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlsplit

from custody.errors import Forbidden
from custody.http.answer import Answer
from custody.http.settings import Settings

_LOCAL = {"localhost", "127.0.0.1", "::1"}
_OWN = (b"", b"same-origin", b"none")  # "none": somebody typed the address
_METHODS = b"GET, POST, PATCH, DELETE"
_HEADERS = b"Authorization, Content-Type, X-Api-Key, X-Custody-Worker, X-Request-Id, traceparent, tracestate"
_SHOWN = b"X-Request-Id, Retry-After"

Headers = Mapping[bytes, bytes]


def require_origin(headers: Headers, scheme: str, settings: Settings, *, open: bool) -> None:
    """Refuses a web page of somebody else that makes a browser call us.

    A browser names the page's origin with all but plain requests such as an image's; for these it tells whether they
    come from elsewhere. Receiving messages is a GET, so that this has to be asked too.
    """
    origin = headers.get(b"origin")
    if origin is not None:
        given = origin.decode("latin-1")
        own = f"{scheme}://{headers.get(b'host', b'').decode('latin-1')}"
        if given not in settings.origins and given != own:
            raise Forbidden(f"a page from {given!r} may not call this server", "Start it with --origin to allow it.")
    elif not open and headers.get(b"sec-fetch-site", b"") not in _OWN:
        raise Forbidden("a page from elsewhere may not call this server", "Start it with --origin to allow it.")


def require_host(headers: Headers, settings: Settings) -> None:
    """Refuses a name that only pretends to be ours: a page could give its own name the address of this machine.

    For a server that asks for no key. With keys it is of no use to a page to get through.
    """
    host = headers.get(b"host", b"").decode("latin-1")
    if host and _name(host) not in _LOCAL | {settings.host}:
        raise Forbidden(f"this server is not {host!r}", "It serves this machine only: call it as 127.0.0.1.")


def _name(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:  # such as a bracket that is not closed
        return ""


def is_preflight(method: str, headers: Headers) -> bool:
    """Whether a browser asks if a page may call."""
    return method == "OPTIONS" and b"origin" in headers and b"access-control-request-method" in headers


def preflight(headers: Headers, settings: Settings) -> Answer:
    """What a page may send; only of use to one that may call at all."""
    if headers[b"origin"].decode("latin-1") not in settings.origins:
        return Answer(b"", 204)
    return Answer(
        b"",
        204,
        (
            (b"access-control-allow-methods", _METHODS),
            (b"access-control-allow-headers", _HEADERS),
            (b"access-control-max-age", b"600"),
        ),
    )


def shared(headers: Headers, settings: Settings) -> list[tuple[bytes, bytes]]:
    """What lets a page that may call read the answer. Without --origin there is nothing of it."""
    if not settings.origins:
        return []
    origin = headers.get(b"origin")
    if origin is None or origin.decode("latin-1") not in settings.origins:
        return [(b"vary", b"Origin")]
    return [
        (b"access-control-allow-origin", origin),
        (b"access-control-expose-headers", _SHOWN),
        (b"vary", b"Origin"),
    ]
