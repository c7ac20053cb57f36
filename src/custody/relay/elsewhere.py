"""Events into a topic of another Custody database: each once, however often it is brought."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import msgspec

from custody.errors import InvalidArgument, NotFound, PublisherUnavailable, SchemaMismatch, Transient
from custody.relay.publisher import Claimed, Publisher
from custody.store import migrate
from custody.store.postgres import Database

_PREFIX = "custody+"


class CustodyPublisher(Publisher):
    """Publishes to a topic of another database. The target remembers the ids of the events that have come, in the same
    transaction, so that a relay that was killed after its publish leaves no duplicate.

    Without a `topic` the event's destination names it: `warehouse:orders`, or `custody+postgresql://…#orders`.
    """

    whole_batches = True

    def __init__(self, url: str | None = None, topic: str | None = None, *, pool_size: int = 4) -> None:
        self._url, self._topic, self._pool_size = url, topic, pool_size
        self._open: dict[str, Database] = {}
        self._lock = threading.Lock()

    def publish(self, event: Claimed) -> None:
        self.publish_many([event])

    def publish_many(self, events: Sequence[Claimed]) -> None:
        url, topic = self._target(events[0].destination)
        try:
            self._database(url).call(
                "outbox_receive",
                topic=topic,
                events=[event.event_id for event in events],
                replays=[event.replays for event in events],
                keys=[event.key for event in events],
                kinds=[event.kind for event in events],
                payloads=[event.data for event in events],
                headers=[_headers(event) for event in events],
            )
        except (Transient, SchemaMismatch, NotFound) as error:
            # a topic that is not there is a matter for the operator, not a reason to give up the events
            raise PublisherUnavailable(f"the other database: {error}") from error

    def _target(self, destination: str) -> tuple[str, str]:
        if destination.startswith(_PREFIX):
            url, hashed, topic = destination[len(_PREFIX) :].partition("#")
        else:
            url, hashed, topic = self._url or "", ":", destination.partition(":")[2]
        topic = self._topic or topic
        if not url or not hashed or not topic:
            raise InvalidArgument(
                f"{destination!r} names no topic of another database",
                "Write name:topic for a publisher of the relay, or custody+postgresql://…#topic.",
            )
        return url, topic

    def _database(self, url: str) -> Database:
        with self._lock:
            found = self._open.get(url)
            if found is None:
                found = Database(url, pool_size=self._pool_size)
                try:
                    with found.connection() as connection:
                        migrate.check(connection)
                except BaseException:
                    found.close()
                    raise
                self._open[url] = found
            return found

    def close(self) -> None:
        with self._lock:
            for database in self._open.values():
                database.close()
            self._open.clear()


def _headers(event: Claimed) -> str:
    found = {
        **event.headers,
        "x-custody-event-id": str(event.event_id),
        "x-custody-event-type": event.event_type,
    }
    return msgspec.json.encode(found).decode()
