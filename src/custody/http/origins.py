"""CORS: which web pages may call the server. Programs other than browsers send none of these headers."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlsplit

from custody.errors import Forbidden
from custody.http.answer import Answer
from custody.model.server_settings import ServerSettings

_LOCAL = {"localhost", "127.0.0.1", "::1"}
_OWN = (b"", b"same-origin", b"none")  # "none": a user typed the address
_METHODS = b"GET, POST, PATCH, DELETE"
_HEADERS = b"Authorization, Content-Type, X-Api-Key, X-Custody-Worker, X-Request-Id, traceparent, tracestate"
_SHOWN = b"X-Request-Id, Retry-After"

Headers = Mapping[bytes, bytes]


def require_origin(headers: Headers, scheme: str, settings: ServerSettings, *, open: bool) -> None:
    """Refuses calls that a browser makes for a web page of another origin.

    A browser sends the page's origin, except with plain requests such as for an image; with those it sends
    Sec-Fetch-Site. Receiving messages is a GET, which a plain request can be, so that header is checked too.
    """
    origin = headers.get(b"origin")
    if origin is not None:
        given = origin.decode("latin-1")
        own = f"{scheme}://{headers.get(b'host', b'').decode('latin-1')}"
        if given not in settings.origins and given != own:
            raise Forbidden(f"a page from {given!r} may not call this server", "Start it with --origin to allow it.")
    elif not open and headers.get(b"sec-fetch-site", b"") not in _OWN:
        raise Forbidden("a web page of another origin may not call this server", "Start it with --origin to allow it.")


def require_host(headers: Headers, settings: ServerSettings) -> None:
    """Refuses a foreign Host header, against DNS rebinding: a page could give its own name the address of this machine.

    Only for a server that needs no key. With keys, a page gains nothing by it.
    """
    host = headers.get(b"host", b"").decode("latin-1")
    if host and _name(host) not in _LOCAL | {settings.host}:
        raise Forbidden(
            f"this server does not answer to the name {host!r}", "It serves this machine only: call it as 127.0.0.1."
        )


def _name(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:  # such as a bracket that is not closed
        return ""


def is_preflight(method: str, headers: Headers) -> bool:
    """Whether a request is a CORS preflight."""
    return method == "OPTIONS" and b"origin" in headers and b"access-control-request-method" in headers


def preflight(headers: Headers, settings: ServerSettings) -> Answer:
    """The answer to a preflight: the methods and headers that a permitted page may send."""
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


def shared(headers: Headers, settings: ServerSettings) -> list[tuple[bytes, bytes]]:
    """The headers that let a permitted page read the answer. Without --origin there are none."""
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
