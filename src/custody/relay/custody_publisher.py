"""Publishes events to a topic of another Custody, each once, however often it is sent."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Sequence
from typing import Any
from uuid import UUID

from psycopg.conninfo import conninfo_to_dict, make_conninfo

from custody import config, extras
from custody.address import Address, is_remote
from custody.engine import Custody
from custody.errors import (
    CustodyError,
    DatabaseUnavailable,
    InvalidArgument,
    InvalidConfig,
    PublisherUnavailable,
    PublishFailed,
    PublishRefused,
    TooLarge,
)
from custody.model.codec import decode_raw
from custody.model.entities import Outgoing
from custody.outbox.events import without_secrets
from custody.relay.addresses import ALLOWING, AddressForbidden, Networks, permitted
from custody.relay.publisher import ClaimedEvent, Publisher
from custody.relay.recently_used import RecentlyUsed
from custody.remote import RemoteCustody
from custody.remote.transport import Transport
from custody.store import migrate
from custody.store.postgres import Database, without_own_passwords

WORKER = "relay"
TIMEOUT = 30.0
MAX_RETRY_AFTER = 3600.0

_PREFIX = "custody+"


class CustodyPublisher(Publisher):
    """Publishes to a topic of another database, or of a server. The target records the ids of events in the same
    transaction, so that a relay that was killed after its publish leaves no duplicate.

    Without a `topic` the event's destination names it: `warehouse:orders`, `custody+postgresql://…#orders` or
    `custody+https://…#orders`. `api_key` (or CUSTODY_API_KEY), PGPASSWORD and password files are used only for the
    server at `url`, not for one that a destination names. The latter needs a public address, or one in
    `allow_networks`.

    Ids of events are compared within their topic and their `source` (or CUSTODY_SOURCE), and over HTTP within the API
    key. Give each outbox whose ids are not random its own source.
    """

    whole_batches = True

    def __init__(
        self,
        url: str | None = None,
        topic: str | None = None,
        *,
        pool_size: int = 4,
        api_key: str | None = None,
        allow_insecure: bool = False,
        source: str | None = None,
        allow_networks: Iterable[str] | Networks = (),
    ) -> None:
        if url is not None and is_remote(url):
            extras.require("client")
            Address.of(url, allow_insecure=True)  # refuses an invalid URL; whether a key may be sent is checked later
        self._networks = allow_networks if isinstance(allow_networks, Networks) else Networks(allow_networks)
        self._url, self._topic, self._pool_size, self._api_key = url, topic, pool_size, api_key
        self._allow_insecure, self._source = allow_insecure, config.load().source if source is None else source
        self._targets: RecentlyUsed[Custody] = RecentlyUsed(self._open, lambda target: target.close())

    def publish(self, event: ClaimedEvent) -> None:
        self.publish_many([event])

    def publish_many(self, events: Sequence[ClaimedEvent]) -> None:
        url, topic = self._target(events[0].destination)
        try:
            target = self._targets.get(url)
            target.receive_events(topic, [_received(event) for event in events], source=self._source)
        except CustodyError as error:
            if isinstance(error, DatabaseUnavailable) and url != self._url:
                self._targets.drop(url)  # its addresses were resolved when it was opened
            raise _failure(error) from error
        except AddressForbidden as error:
            raise PublishRefused(str(error), ALLOWING) from error
        except OSError as error:
            raise PublisherUnavailable(f"the other Custody: {error}") from error

    def _target(self, destination: str) -> tuple[str, str]:
        if destination.startswith(_PREFIX):
            url, hashed, topic = destination[len(_PREFIX) :].partition("#")
        else:
            url, hashed, topic = self._url or "", ":", destination.partition(":")[2]
        topic = self._topic or topic
        if not url or not hashed or not topic:
            raise InvalidArgument(
                f"{without_secrets(destination)!r} names no topic of another database",
                "Write name:topic for a publisher of the relay, custody+postgresql://…#topic or custody+https://…#topic.",
            )
        return url, topic

    def _open(self, url: str) -> Custody:
        return self._open_server(url) if is_remote(url) else self._open_database(url)

    def _open_database(self, url: str) -> Custody:
        found = Database(
            url if url == self._url else self._pinned(without_own_passwords(url)),
            pool_size=self._pool_size,
            statement_timeout=TIMEOUT,
        )
        return Custody(found.require(migrate.check), worker=WORKER)

    def _open_server(self, url: str) -> Custody:
        settings = config.load()
        own = (self._api_key or settings.api_key) if url == self._url else None
        networks = None if url == self._url else self._networks

        def pool(**options: Any) -> Any:
            from custody.relay.client_pool import ClientPool  # only servers need urllib3

            return ClientPool(TIMEOUT, networks, **options)

        address = Address.of(url, otherwise=own, allow_insecure=self._allow_insecure or settings.allow_insecure)
        # one attempt, because the relay decides when to retry
        transport = Transport(address, ca=settings.ca, retry_for=0.0, pool_size=self._pool_size, pool=pool)
        return RemoteCustody(transport, worker=WORKER)

    def _pinned(self, url: str) -> str:
        """Adds the permitted addresses to the URL of a database that an event names, so that libpq does not resolve the
        name again. A Unix socket counts as the loopback address."""
        given = conninfo_to_dict(url)
        hosts = str(given.get("host") or given.get("hostaddr") or "").split(",")
        literal = str(given.get("hostaddr") or "").split(",") if given.get("hostaddr") else hosts
        ports = str(given.get("port") or "5432").split(",")
        sockets = [not host or host.startswith(("/", "@")) for host in hosts]
        if all(sockets) and "service" not in given and self._networks.permit("127.0.0.1"):
            return url
        if any(sockets) or "service" in given:
            raise AddressForbidden(f"the server at {','.join(hosts) or 'its default socket'} is one of this machine")
        found = []
        for place, (host, asked) in enumerate(zip(hosts, literal, strict=True)):
            for address in permitted(socket.getaddrinfo(asked, None, type=socket.SOCK_STREAM), asked, self._networks):
                found.append((host, str(address[4][0]), ports[place] if len(ports) > 1 else ports[0]))
        names, addresses, numbers = (",".join(column) for column in zip(*found, strict=True))
        return make_conninfo(url, host=names, hostaddr=addresses, port=numbers)

    def close(self) -> None:
        self._targets.close()


def _received(event: ClaimedEvent) -> tuple[UUID, int, Outgoing]:
    """The event as a message, with its id and type in the headers."""
    headers = {
        **event.headers,
        "x-custody-event-id": str(event.event_id),
        "x-custody-event-type": event.event_type,
    }
    return event.event_id, event.replays, Outgoing(decode_raw(event.kind, event.data), key=event.key, headers=headers)


def _failure(error: CustodyError) -> CustodyError:
    """The error for the relay. A missing topic, a key without the right, or a key that must not be sent has to be fixed
    by an operator, so it counts as an outage and no event dies of it."""
    text = f"the other Custody: {error.code}: {error}"
    if isinstance(error, InvalidArgument | TooLarge) and not isinstance(error, InvalidConfig):
        return PublishRefused(text)  # a retry would fail in the same way
    wait = None if error.retry_after is None else min(error.retry_after, MAX_RETRY_AFTER)
    if error.status == 500:
        return PublishFailed(text, retry_after=wait)
    return PublisherUnavailable(text, busy=error.status == 429, retry_after=wait)
