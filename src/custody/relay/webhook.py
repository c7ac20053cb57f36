"""Events as HTTP requests: the body is the payload, byte for byte; the headers say what it is, and sign it."""

from __future__ import annotations

import hashlib
import hmac
import http.client
import ssl
import time
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from custody.errors import InvalidArgument, PublisherUnavailable, PublishFailed, PublishRefused
from custody.policy import Duration, seconds
from custody.relay.publisher import Claimed, Publisher

CONTENT_TYPES = {"j": "application/json", "t": "text/plain; charset=utf-8", "b": "application/octet-stream"}
UNAVAILABLE = (429, 502, 503, 504)
"""The service, or what stands before it, says that it takes nothing now."""


def signature(secret: bytes, timestamp: str, body: bytes) -> str:
    """What `X-Custody-Signature` has to be: HMAC-SHA256 over the time, a dot and the body, in hexadecimal."""
    return "sha256=" + hmac.new(secret, timestamp.encode() + b"." + body, hashlib.sha256).hexdigest()


class WebhookPublisher(Publisher):
    """Sends each event to a URL: the one given here, or the event's destination if that is one.

    By default 2xx is success; 429, 502, 503 and 504 and a connection that cannot be made mean that the service is down;
    408, 409, 425 and 5xx are failures; every other answer refuses the event for good. Redirects are not followed.
    `success` may judge otherwise, from status and body. With a `secret` the request is signed (see `signature`).
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

    def publish(self, event: Claimed) -> None:
        scheme, host, path = _target(self._url or event.destination)
        connection: http.client.HTTPConnection
        if scheme == "https":
            connection = http.client.HTTPSConnection(host, timeout=self._timeout, context=ssl.create_default_context())
        else:
            connection = http.client.HTTPConnection(host, timeout=self._timeout)
        try:
            try:
                connection.connect()
            except OSError as error:
                raise PublisherUnavailable(f"{host} cannot be reached: {error}") from error
            try:
                connection.request(self._method, path, body=event.data, headers=self._request_headers(event))
                answer = connection.getresponse()
                status, body = answer.status, answer.read(64 * 1024)
            except (OSError, http.client.HTTPException) as error:
                raise PublishFailed(f"{host} gave no answer: {type(error).__name__} {error}") from error
            except ValueError as error:
                raise PublishRefused(f"the event cannot be sent as an HTTP request: {error}") from error
        finally:
            connection.close()
        self._judge(host, status, body)

    def _request_headers(self, event: Claimed) -> dict[str, str]:
        found = {
            "Content-Type": CONTENT_TYPES[event.kind],
            **self._headers,
            **event.headers,
            "X-Custody-Event-Id": str(event.event_id),
            "X-Custody-Event-Type": event.event_type,
            "X-Custody-Attempt": str(event.attempts + 1),
        }
        if event.key is not None:
            found["X-Custody-Key"] = event.key
        if self._secret is not None:
            timestamp = str(int(self._clock()))
            found["X-Custody-Timestamp"] = timestamp
            found["X-Custody-Signature"] = signature(self._secret, timestamp, event.data)
        # bytes beyond Latin-1 would be refused by http.client; servers read them as UTF-8
        return {name: value.encode().decode("latin-1") for name, value in found.items()}

    def _judge(self, host: str, status: int, body: bytes) -> None:
        if self._success(status, body) if self._success is not None else 200 <= status < 300:
            return
        said = f"{host} answered {status}: {body[:200].decode('utf-8', 'replace')}"
        if status in UNAVAILABLE:
            raise PublisherUnavailable(said)
        if status >= 500 or status in (408, 409, 425) or self._success is not None:
            raise PublishFailed(said)
        raise PublishRefused(said)


def _target(url: str) -> tuple[str, str, str]:
    parts: Any = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise InvalidArgument(f"{url!r} is no URL of a webhook", "Give one that begins with http:// or https://.")
    return (
        parts.scheme,
        parts.netloc.rpartition("@")[2],
        (parts.path or "/") + (f"?{parts.query}" if parts.query else ""),
    )
