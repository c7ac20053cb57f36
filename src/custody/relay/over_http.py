"""Events into a topic of another Custody, through its server: one request for a batch, and each event once."""

from __future__ import annotations

import base64
import http.client
import ssl
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from urllib.parse import quote, urlsplit

import msgspec

from custody.address import Address
from custody.errors import InvalidConfig, PublisherUnavailable, PublishFailed, PublishRefused
from custody.outbox.events import shown
from custody.relay.addresses import ALLOWING, Forbidden, Networks
from custody.relay.publisher import Claimed
from custody.relay.within import connected, retry_after
from custody.wire.answers import ErrorOut
from custody.wire.requests import EventIn, EventsIn

TIMEOUT = 30.0
MAX_RETRY_AFTER = 3600.0

_REFUSED = {"invalid_argument", "invalid_json", "invalid_payload", "too_large"}
"""What the same event would meet again. All else is a matter for the operator, or passes."""


class Served:
    """A server that takes events. One attempt for each call; a connection of its own, as for a webhook."""

    def __init__(
        self, address: Address, *, ca: Path | None = None, timeout: float = TIMEOUT, networks: Networks | None = None
    ) -> None:
        """`networks`: those that it may be in beside the public ones; None for any."""
        parts = urlsplit(address.url)
        self._networks = networks
        self._address, self._host, self._path, self._timeout = address, parts.netloc, parts.path, timeout
        self._context: ssl.SSLContext | None = None
        if address.secure:
            try:
                self._context = ssl.create_default_context(cafile=None if ca is None else str(ca))
            except (OSError, ssl.SSLError) as error:
                raise InvalidConfig(f"{ca} is not a file of certificates: {error}", "Give one in PEM form.") from error

    def receive(
        self, topic: str, events: Sequence[Claimed], headers: Sequence[dict[str, str]], source: str = ""
    ) -> None:
        """Brings the events, all of them or none; those that had come before are left out there."""
        found = [_event(event, named) for event, named in zip(events, headers, strict=True)]
        given = EventsIn(events=found, source=source)
        status, body, named = self._request(f"/topics/{quote(topic, safe='')}/events", msgspec.json.encode(given))
        if 200 <= status < 300:
            return
        code, said = _problem(body)
        text = f"the server at {self._address.url} answered {status}: {said}"
        if code in _REFUSED:
            raise PublishRefused(text)
        if 300 <= status < 400 and "location" in named:
            text = f"the server at {self._address.url} answered {status}, a redirect to {shown(named['location'])}"
        wait = retry_after(named, time.time(), MAX_RETRY_AFTER)
        if status < 500 or status in (502, 503, 504):
            # a topic that is not there, a key without the right: no reason to give up the events
            raise PublisherUnavailable(text, busy=status == 429, retry_after=wait)
        raise PublishFailed(text, retry_after=wait)

    def _request(self, path: str, body: bytes) -> tuple[int, bytes, http.client.HTTPMessage]:
        headers = {"Content-Type": "application/json", "X-Custody-Worker": "relay"}
        if self._address.key is not None:
            headers["Authorization"] = f"Bearer {self._address.key}"
        try:
            with closing(connected(self._host, self._timeout, self._context, self._networks)) as connection:
                connection.request("POST", self._path + path, body, headers)
                with connection.getresponse() as answer:
                    return answer.status, answer.read(), answer.headers
        except Forbidden as error:
            raise PublishRefused(str(error), ALLOWING) from error
        except (OSError, http.client.HTTPException) as error:
            # whether they have come is unknown; the same again is harmless
            raise PublisherUnavailable(
                f"the server at {self._address.url} gave no answer: {type(error).__name__} {error}"
            ) from error


def _event(event: Claimed, headers: dict[str, str]) -> EventIn:
    made = EventIn(event_id=event.event_id, replays=event.replays, key=event.key, headers=headers)
    if event.kind == "b":
        made.payload_base64 = base64.b64encode(event.data).decode()
    else:
        made.payload = msgspec.Raw(event.data if event.kind == "j" else msgspec.json.encode(event.data.decode()))
    return made


def _problem(body: bytes) -> tuple[str, str]:
    """The code and the text of an error, if it is one of Custody's."""
    try:
        problem = msgspec.json.decode(body, type=ErrorOut).error
        return problem.code, f"{problem.code}: {problem.message}"
    except msgspec.MsgspecError:
        return "", body[:200].decode("utf-8", "replace")
