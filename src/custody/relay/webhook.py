"""Events as HTTP requests: the body is the payload, byte for byte; the headers say what it is, and sign it."""

from __future__ import annotations

import hashlib
import hmac
import http.client
import ssl
import time
from base64 import b64encode
from collections.abc import Callable, Mapping
from typing import NamedTuple
from urllib.parse import unquote_to_bytes, urlsplit

from custody.errors import InvalidArgument, PublisherUnavailable, PublishFailed, PublishRefused
from custody.outbox.events import shown
from custody.policy import Duration, seconds
from custody.relay.publisher import Claimed, Publisher
from custody.relay.within import connected

CONTENT_TYPES = {"j": "application/json", "t": "text/plain; charset=utf-8", "b": "application/octet-stream"}
UNAVAILABLE = (429, 502, 503, 504)
"""The service, or what stands before it, says that it takes nothing now."""


NOT_PASSED_ON = frozenset(
    {"connection", "content-length", "expect", "host", "keep-alive", "proxy-authenticate", "proxy-authorization",
     "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade"}
)  # fmt: skip
"""Headers of a request and not of its content. An event's are left out, and so are those named like Custody's own."""


def signature(secret: bytes, event_id: str, timestamp: str, body: bytes) -> str:
    """What `X-Custody-Signature` has to be: HMAC-SHA256 over event id, time and body with dots between them."""
    signed = f"{event_id}.{timestamp}.".encode() + body
    return "v1=" + hmac.new(secret, signed, hashlib.sha256).hexdigest()


class WebhookPublisher(Publisher):
    """Sends each event to a URL: the one given here, or the event's destination if that is one.

    By default 2xx is success; 429, 502, 503 and 504 and a connection that cannot be made mean that the service is down;
    408, 409, 425 and 5xx are failures; every other answer refuses the event for good. Redirects are not followed.
    `success` may judge otherwise, from status and body. With a `secret` the request is signed (see `signature`). User
    and password in the URL are sent as basic authentication. `timeout` is for the whole request.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        method: str = "POST",
        headers: Mapping[str, str] | None = None,
        secret: str | bytes | None = None,
        timeout: Duration = "10s",
        success: Callable[[int, bytes], bool] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if url is not None:
            _target(url)
        self._url, self._method, self._headers = url, method, dict(headers or {})
        self._secret = secret.encode() if isinstance(secret, str) else secret
        self._timeout = seconds(timeout)
        self._success, self._clock = success, clock
        self._context: ssl.SSLContext | None = None

    def publish(self, event: Claimed) -> None:
        target = _target(self._url or event.destination)
        headers = self._request_headers(event, target)
        try:
            connection = connected(target.host, self._timeout, self._tls() if target.secure else None)
        except OSError as error:
            raise PublisherUnavailable(f"{target.host} cannot be reached: {error}") from error
        except UnicodeError as error:
            raise PublishRefused(f"{target.host} is no name of a host: {error}") from error
        try:
            connection.request(self._method, target.path, body=event.data, headers=headers)
            with connection.getresponse() as answer:
                status, body = answer.status, self._body(answer)
        except (OSError, http.client.HTTPException) as error:
            raise PublishFailed(f"{target.host} gave no answer: {type(error).__name__} {error}") from error
        except ValueError as error:
            raise PublishRefused(f"the event cannot be sent as an HTTP request: {error}") from error
        finally:
            connection.close()
        self._judge(target.host, status, body)

    def _tls(self) -> ssl.SSLContext:
        if self._context is None:
            self._context = ssl.create_default_context()
        return self._context

    def _body(self, answer: http.client.HTTPResponse) -> bytes:
        """Of the answer, as far as it counts: without `success` the status decides, however slow the rest may be."""
        if self._success is not None:
            return answer.read(64 * 1024)
        if 200 <= answer.status < 300:
            return b""
        try:
            return answer.read(200)
        except (OSError, http.client.HTTPException):
            return b""

    def _request_headers(self, event: Claimed, target: Target) -> dict[str, str]:
        """Those of the event, over them those of the publisher, over them Custody's own: names in any case."""
        found = [("Content-Type", CONTENT_TYPES[event.kind])]
        found += [(name, value) for name, value in event.headers.items() if _passed_on(name.lower())]
        if target.authorization is not None:
            found.append(("Authorization", target.authorization))
        found += self._headers.items()
        found += [
            ("X-Custody-Event-Id", str(event.event_id)),
            ("X-Custody-Event-Type", event.event_type),
            ("X-Custody-Attempt", str(event.attempts + 1)),
        ]
        if event.key is not None:
            found.append(("X-Custody-Key", event.key))
        if self._secret is not None:
            timestamp = str(int(self._clock()))
            signed = signature(self._secret, str(event.event_id), timestamp, event.data)
            found += [("X-Custody-Timestamp", timestamp), ("X-Custody-Signature", signed)]
        merged = {name.lower(): (name, value) for name, value in found}
        # bytes beyond Latin-1 would be refused by http.client; servers read them as UTF-8
        return {name: value.encode().decode("latin-1") for name, value in merged.values()}

    def _judge(self, host: str, status: int, body: bytes) -> None:
        if self._success(status, body) if self._success is not None else 200 <= status < 300:
            return
        said = f"{host} answered {status}: {body[:200].decode('utf-8', 'replace')}"
        if status in UNAVAILABLE:
            raise PublisherUnavailable(said, busy=status == 429)
        if status >= 500 or status in (408, 409, 425) or self._success is not None:
            raise PublishFailed(said)
        raise PublishRefused(said)


def _passed_on(name: str) -> bool:
    return name not in NOT_PASSED_ON and not name.startswith("x-custody-")


class Target(NamedTuple):
    """Where a request goes, and who it says it is from."""

    secure: bool
    host: str
    path: str
    authorization: str | None


def _target(url: str) -> Target:
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # a port that is no number
        known = False
    if not known:
        raise InvalidArgument(
            f"{shown(url)!r} is no URL of a webhook", "Give one that begins with http:// or https://."
        )
    user, _, host = parts.netloc.rpartition("@")
    given = b64encode(unquote_to_bytes(user if ":" in user else f"{user}:")).decode() if user else None
    return Target(
        secure=parts.scheme == "https",
        host=host,
        path=(parts.path or "/") + (f"?{parts.query}" if parts.query else ""),
        authorization=None if given is None else f"Basic {given}",
    )
