"""Events into a topic of another Custody: each once, however often it is brought."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Sequence

import msgspec
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from custody import config
from custody.address import Address, is_remote
from custody.errors import (
    DatabaseUnavailable,
    InsecureKey,
    InvalidArgument,
    NotFound,
    PublisherUnavailable,
    PublishRefused,
    QueueFull,
    SchemaMismatch,
    Transient,
)
from custody.outbox.events import shown
from custody.relay.addresses import ALLOWING, Forbidden, Networks, permitted
from custody.relay.opened import Opened
from custody.relay.over_http import TIMEOUT, Served
from custody.relay.publisher import Claimed, Publisher
from custody.store import migrate
from custody.store.postgres import Database, without_own_passwords

_PREFIX = "custody+"


class CustodyPublisher(Publisher):
    """Publishes to a topic of another database, or of a server. The target remembers the ids of the events that have
    come, in the same transaction, so that a relay that was killed after its publish leaves no duplicate.

    Without a `topic` the event's destination names it: `warehouse:orders`, `custody+postgresql://…#orders` or
    `custody+https://…#orders`. `api_key` (or CUSTODY_API_KEY), PGPASSWORD and password files are for the server at
    `url`, and for no other that a destination may name. One that a destination names has a public address, or one of
    `allow_networks`.

    Ids of events are compared within their topic and their `source` (or CUSTODY_SOURCE), and over HTTP within the API
    key: give outboxes whose ids are not random a source each.
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
        self._networks = allow_networks if isinstance(allow_networks, Networks) else Networks(allow_networks)
        self._url, self._topic, self._pool_size, self._api_key = url, topic, pool_size, api_key
        self._allow_insecure, self._source = allow_insecure, config.load().source if source is None else source
        self._databases: Opened[Database] = Opened(self._open, Database.close)
        self._servers: Opened[Served] = Opened(self._address, lambda _: None)

    def publish(self, event: Claimed) -> None:
        self.publish_many([event])

    def publish_many(self, events: Sequence[Claimed]) -> None:
        url, topic = self._target(events[0].destination)
        if is_remote(url):
            self._servers.get(url).receive(topic, events, [_named(event) for event in events], self._source)
            return
        try:
            _receive(self._databases.get(url), topic, events, self._source)
        except (Transient, SchemaMismatch, NotFound) as error:
            if isinstance(error, DatabaseUnavailable) and url != self._url:
                self._databases.drop(url)  # its addresses were looked up when it was opened
            # a topic that is not there is a matter for the operator, not a reason to give up the events
            raise PublisherUnavailable(f"the other database: {error}", busy=isinstance(error, QueueFull)) from error
        except Forbidden as error:
            raise PublishRefused(str(error), ALLOWING) from error
        except OSError as error:
            raise PublisherUnavailable(f"the other database: {error}") from error

    def _target(self, destination: str) -> tuple[str, str]:
        if destination.startswith(_PREFIX):
            url, hashed, topic = destination[len(_PREFIX) :].partition("#")
        else:
            url, hashed, topic = self._url or "", ":", destination.partition(":")[2]
        topic = self._topic or topic
        if not url or not hashed or not topic:
            raise InvalidArgument(
                f"{shown(destination)!r} names no topic of another database",
                "Write name:topic for a publisher of the relay, custody+postgresql://…#topic or custody+https://…#topic.",
            )
        return url, topic

    def _open(self, url: str) -> Database:
        found = Database(
            url if url == self._url else self._pinned(without_own_passwords(url)),
            pool_size=self._pool_size,
            statement_timeout=TIMEOUT,
        )
        try:
            with found.connection() as connection:
                migrate.check(connection)
        except BaseException:
            found.close()
            raise
        return found

    def _pinned(self, url: str) -> str:
        """A URL of a server that an event names, with the addresses that it may have: libpq asks for them no more. A
        socket of this machine is as good as its loopback address."""
        given = conninfo_to_dict(url)
        hosts = str(given.get("host") or given.get("hostaddr") or "").split(",")
        literal = str(given.get("hostaddr") or "").split(",") if given.get("hostaddr") else hosts
        ports = str(given.get("port") or "5432").split(",")
        sockets = [not host or host.startswith(("/", "@")) for host in hosts]
        if all(sockets) and "service" not in given and self._networks.permit("127.0.0.1"):
            return url
        if any(sockets) or "service" in given:
            raise Forbidden(f"the server at {','.join(hosts) or 'its default socket'} is one of this machine")
        found = []
        for place, (host, asked) in enumerate(zip(hosts, literal, strict=True)):
            for address in permitted(socket.getaddrinfo(asked, None, type=socket.SOCK_STREAM), asked, self._networks):
                found.append((host, str(address[4][0]), ports[place] if len(ports) > 1 else ports[0]))
        names, addresses, numbers = (",".join(column) for column in zip(*found, strict=True))
        return make_conninfo(url, host=names, hostaddr=addresses, port=numbers)

    def _address(self, url: str) -> Served:
        settings = config.load()
        own = (self._api_key or settings.api_key) if url == self._url else None
        networks = None if url == self._url else self._networks
        try:
            address = Address.of(url, otherwise=own, allow_insecure=self._allow_insecure or settings.allow_insecure)
        except InsecureKey as error:  # a matter for the operator, not a reason to give up the events
            raise PublisherUnavailable(str(error)) from error
        return Served(address, ca=settings.ca, networks=networks)

    def close(self) -> None:
        self._databases.close()


def _receive(database: Database, topic: str, events: Sequence[Claimed], source: str) -> None:
    """Brings the events, all of them or none. What is wrong with one of them would be so again."""
    try:
        database.call(
            "outbox_receive",
            topic=topic,
            events=[event.event_id for event in events],
            replays=[event.replays for event in events],
            keys=[event.key for event in events],
            kinds=[event.kind for event in events],
            payloads=[event.data for event in events],
            headers=[_headers(event) for event in events],
            source=source,
        )
    except InvalidArgument as error:
        raise PublishRefused(f"the other database: {error}") from error


def _headers(event: Claimed) -> str:
    return msgspec.json.encode(_named(event)).decode()


def _named(event: Claimed) -> dict[str, str]:
    """The headers of the message: those of the event, and which one it is."""
    return {
        **event.headers,
        "x-custody-event-id": str(event.event_id),
        "x-custody-event-type": event.event_type,
    }
