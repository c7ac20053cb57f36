"""Publishes events as HTTP requests. The body is the payload, byte for byte; headers identify and sign it."""

from __future__ import annotations

import hashlib
import hmac
import http.client
import ssl
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple
from urllib.parse import unquote_to_bytes, urljoin, urlsplit

from custody.errors import InvalidArgument, PublisherUnavailable, PublishFailed, PublishRefused
from custody.model.policy import Duration, seconds
from custody.outbox.events import without_secrets
from custody.relay.addresses import ALLOWING, AddressForbidden, Networks
from custody.relay.deadline import open_connection, retry_after
from custody.relay.publisher import ClaimedEvent, Publisher

CONTENT_TYPES = {"j": "application/json", "t": "text/plain; charset=utf-8", "b": "application/octet-stream"}
UNAVAILABLE = (429, 502, 503, 504)
"""Statuses by which a service, or a proxy before it, says that it is not available."""

NOT_PASSED_ON = frozenset(
    {"connection", "content-length", "expect", "host", "keep-alive", "proxy-authenticate", "proxy-authorization",
     "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade",
     "webhook-id", "webhook-timestamp", "webhook-signature"}
)  # fmt: skip
"""Headers of an event that are not sent, as they would be headers of the request itself. Those named like Custody's own
are left out too."""

SECRET = "whsec_"


def signature(secret: str | bytes, event_id: str, timestamp: str, body: bytes) -> str:
    """A signature for the header `webhook-signature`, by the Standard Webhooks specification: `v1,` and the HMAC-SHA256
    of event id, time and body, joined by dots, in base64. A secret is `whsec_` and base64, or the bytes themselves."""
    signed = f"{event_id}.{timestamp}.".encode() + body
    return "v1," + b64encode(hmac.new(_key(secret), signed, hashlib.sha256).digest()).decode()


def _key(secret: str | bytes) -> bytes:
    if isinstance(secret, bytes):
        key = secret
    else:
        try:
            key = b64decode(secret.removeprefix(SECRET), validate=True) if secret.startswith(SECRET) else b""
        except ValueError:
            key = b""
    if not key:
        raise InvalidArgument(
            "the secret of a webhook must be whsec_ followed by base64",
            "Make one with: printf 'whsec_%s' \"$(openssl rand -base64 32)\"",
        )
    return key


class WebhookPublisher(Publisher):
    """Sends each event to a URL: the one given here, or the event's destination.

    By default 2xx is success; a status in `refused` makes the event dead; 429, 502, 503, 504 and a failed connection
    mean that the service is down or overloaded; every other answer is a failure. Redirects are failures too: they are
    not followed. `Retry-After` is obeyed up to `max_retry_after`. `success` can decide otherwise, from status and body.
    With a `secret` the request is signed (see `signature`); during a rotation give both secrets. User and password in
    the URL are sent as basic authentication. `timeout` is for the whole request. It connects only to public addresses,
    and to those in `allow_networks` (`["10.0.0.0/8"]`).
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        method: str = "POST",
        headers: Mapping[str, str] | None = None,
        secret: str | bytes | Sequence[str | bytes] | None = None,
        timeout: Duration = "10s",
        success: Callable[[int, bytes], bool] | None = None,
        refused: Collection[int] = (410,),
        max_retry_after: Duration = "1h",
        allow_networks: Iterable[str] | Networks = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        if url is not None:
            _target(url)
        self._url, self._method, self._headers = url, method, dict(headers or {})
        given = [secret] if isinstance(secret, str | bytes) else secret or ()
        self._secrets = [_key(one) for one in given]
        self._timeout, self._max_retry_after = seconds(timeout), seconds(max_retry_after)
        self._success, self._refused, self._clock = success, frozenset(refused), clock
        self._networks = allow_networks if isinstance(allow_networks, Networks) else Networks(allow_networks)
        self._context: ssl.SSLContext | None = None

    def publish(self, event: ClaimedEvent) -> None:
        url = self._url or event.destination
        target = _target(url)
        headers = self._request_headers(event, target)
        try:
            context = self._tls() if target.secure else None
            connection = open_connection(target.host, self._timeout, context, self._networks)
        except AddressForbidden as error:
            raise self._forbidden(error) from error
        except OSError as error:
            raise PublisherUnavailable(f"{target.host} cannot be reached: {error}") from error
        except UnicodeError as error:
            raise PublishRefused(f"{target.host} is not a valid host name: {error}") from error
        try:
            connection.request(self._method, target.path, body=event.data, headers=headers)
            with connection.getresponse() as answer:
                status, body, named = answer.status, self._body(answer), answer.headers
        except (OSError, http.client.HTTPException) as error:
            raise PublishFailed(f"{target.host} gave no answer: {type(error).__name__} {error}") from error
        except ValueError as error:
            raise PublishRefused(f"the event cannot be sent as an HTTP request: {error}") from error
        finally:
            connection.close()
        self._judge(target.host, url, status, body, named)

    def _forbidden(self, error: AddressForbidden) -> Exception:
        """An event that names the address is refused. For a URL of the relay's configuration events wait until it is
        corrected."""
        kind = PublishRefused if self._url is None else PublisherUnavailable
        return kind(str(error), ALLOWING)

    def _tls(self) -> ssl.SSLContext:
        if self._context is None:
            self._context = ssl.create_default_context()
        return self._context

    def _body(self, answer: http.client.HTTPResponse) -> bytes:
        """The part of the answer's body that is needed. Without `success` the status decides, so a slow body does not
        matter."""
        if self._success is not None:
            return answer.read(64 * 1024)
        if 200 <= answer.status < 300:
            return b""
        try:
            return answer.read(200)
        except (OSError, http.client.HTTPException):
            return b""

    def _request_headers(self, event: ClaimedEvent, target: Target) -> dict[str, str]:
        """Merges headers, ignoring case: the publisher's override the event's, and Custody's own override both."""
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
        timestamp = str(int(self._clock()))
        found += [("webhook-id", str(event.event_id)), ("webhook-timestamp", timestamp)]
        if self._secrets:
            signed = (signature(secret, str(event.event_id), timestamp, event.data) for secret in self._secrets)
            found.append(("webhook-signature", " ".join(signed)))
        merged = {name.lower(): (name, value) for name, value in found}
        # http.client refuses characters beyond Latin-1; servers read the bytes as UTF-8
        return {name: value.encode().decode("latin-1") for name, value in merged.values()}

    def _judge(self, host: str, url: str, status: int, body: bytes, headers: http.client.HTTPMessage) -> None:
        if self._success(status, body) if self._success is not None else 200 <= status < 300:
            return
        said = f"{host} answered {status}: {body[:200].decode('utf-8', 'replace')}"
        if status in self._refused:
            raise PublishRefused(said)
        if 300 <= status < 400 and "location" in headers:
            said = f"{host} answered {status}, a redirect to {without_secrets(urljoin(url, headers['location']))}"
            raise PublishFailed(said, "Redirects are not followed: use the address that it points to.")
        wait = retry_after(headers, self._clock(), self._max_retry_after)
        if status in UNAVAILABLE:
            raise PublisherUnavailable(said, busy=status == 429, answered=True, retry_after=wait)
        raise PublishFailed(said, retry_after=wait)


def _passed_on(name: str) -> bool:
    return name not in NOT_PASSED_ON and not name.startswith("x-custody-")


class Target(NamedTuple):
    """The parts of a URL that a request needs."""

    secure: bool
    host: str
    path: str
    authorization: str | None


def _target(url: str) -> Target:
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # an invalid port
        known = False
    if not known:
        raise InvalidArgument(
            f"{without_secrets(url)!r} is not the URL of a webhook", "Give one that begins with http:// or https://."
        )
    user, _, host = parts.netloc.rpartition("@")
    given = b64encode(unquote_to_bytes(user if ":" in user else f"{user}:")).decode() if user else None
    return Target(
        secure=parts.scheme == "https",
        host=host,
        path=(parts.path or "/") + (f"?{parts.query}" if parts.query else ""),
        authorization=None if given is None else f"Basic {given}",
    )
