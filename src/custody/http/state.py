"""The state of a running server: the engine, threads, buffers, coalescers and long polls."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import ParamSpec, TypeVar
from uuid import UUID

from custody.coalesced import Ack, Claim, Placed, Publish
from custody.engine import Custody
from custody.engine.server_verbs import ServerVerbs
from custody.errors import CustodyError, GroupExists, GroupNotFound, LeaseLost
from custody.http.buffers import Buffer
from custody.http.coalesce import Coalescer
from custody.http.connections import Connections
from custody.http.database_metrics import LIMIT, DatabaseMetrics, Overview
from custody.http.keyring import Keyring
from custody.http.long_polls import LongPolls, Place
from custody.http.metrics import Metrics
from custody.http.rights import ANYBODY, Caller
from custody.http.threads import Threads, in_thread
from custody.http.wakeups import Wakeups
from custody.model.entities import DEFAULT_GROUP, Settled
from custody.model.policy import seconds
from custody.model.retention import size_in_bytes
from custody.model.server_settings import ServerSettings
from custody.verbs.claim import Lease
from custody.verbs.upkeep import EVERY, keep_up

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


class ServerState:
    """The state of one server process. Opened and closed in its event loop."""

    def __init__(self, engine: Custody, settings: ServerSettings) -> None:
        self.engine, self.verbs, self.settings = engine, ServerVerbs(engine), settings
        self.max_body = size_in_bytes(settings.max_body)
        self.body_timeout, self.max_wait = seconds(settings.body_timeout), seconds(settings.max_wait)
        self.threads = Threads(settings.connections)
        self.bodies = Buffer(size_in_bytes(settings.max_buffered), "bodies")
        self.answers = Buffer(size_in_bytes(settings.max_buffered), "answers")
        self.inflating = asyncio.Semaphore(2)
        self.reads = asyncio.Semaphore(settings.connections)
        self.connections = Connections(
            most=settings.max_connections,
            for_each=settings.max_connections_per_address,
            write_timeout=seconds(settings.write_timeout),
            full=self.answers.full,
        )
        self.metrics = Metrics(
            waiting=lambda: len(self.long_polls),
            connections=self.verbs.connections,
            clients=self.connections,
            bodies=lambda: self.bodies.held,
        )
        self.database_metrics = DatabaseMetrics(self._overview)
        self.publishes: Coalescer[Publish, Placed] = Coalescer(
            partial(self.verbs.publish_each, patient=False),
            self.threads.quick,
            keys=lambda publish: {topic for topic, _ in publish.messages},
            enabled=settings.coalesce,
            observe=self.metrics.coalesced("publish"),
        )
        self.batches: Coalescer[Publish, Placed] = Coalescer(
            self._publish_batch,
            self.threads.quick,
            keys=lambda publish: {topic for topic, _ in publish.messages},
            slots=2,
            most=1,  # they are large: one at a time for each topic, so that threads are left for others
        )
        self.acks: Coalescer[Ack, Settled] = Coalescer(
            partial(self.verbs.ack_each, patient=False),
            self.threads.quick,
            keys=lambda ack: (ack.lease_id,) if ack.lease_id is not None else (),
            slots=2,
            most=60,  # each is a subtransaction, of which PostgreSQL caches 64 per transaction
            enabled=settings.coalesce,
            observe=self.metrics.coalesced("ack"),
        )
        self.long_polls = LongPolls(self)
        self.keys = Keyring(
            self.verbs.key_ring,
            required=not settings.loopback,
            open=settings.open,
            in_thread=lambda read: asyncio.get_running_loop().run_in_executor(self.threads.keys, read),
        )
        self._pinging: asyncio.Future[None] | None = None
        self.wakeups = Wakeups()
        self._ended, self._stopping, self._duties = threading.Event(), False, ExitStack()
        self._stop_listening: Callable[[], None] | None = None

    def open(self) -> None:
        """Starts to listen for wake-ups, and the upkeep of the log."""
        loop = asyncio.get_running_loop()
        self._stop_listening = self.verbs.listen_to_all(partial(self._hear, loop))
        threading.Thread(
            target=keep_up, args=[self.engine.maintain, self._ended, EVERY], name="custody-upkeep", daemon=True
        ).start()
        threading.Thread(target=self._move_outbox, name="custody-outbox", daemon=True).start()
        self._duties.enter_context(self.engine.ticking())

    def _hear(self, loop: asyncio.AbstractEventLoop, topic: str | None) -> None:
        if not self._ended.is_set():
            loop.call_soon_threadsafe(self._tell, topic)

    def _tell(self, topic: str | None) -> None:
        self.long_polls.wake(topic)
        self.wakeups.wake(topic)

    def _move_outbox(self) -> None:
        """Moves events for topics of this database into the log, at intervals."""
        keep_up(self.verbs.move_outbox, self._ended, 1.0)

    def _publish_batch(self, batches: Sequence[Publish]) -> list[Placed | CustodyError]:
        return [answer for batch in batches for answer in (self._by_copy(batch) or self.verbs.publish_each([batch]))]

    def _by_copy(self, batch: Publish) -> list[Placed | CustodyError] | None:
        """Publishes a batch by COPY, if it has only plain messages of one topic; otherwise None."""
        topics = {topic for topic, _ in batch.messages}
        messages = [message for _, message in batch.messages]
        if len(topics) > 1 or batch.producer is not None or any(message.delayed for message in messages):
            return None
        try:
            return [[*self.engine.publish_many(topics.pop(), messages, expected_offset=batch.expected_offset)]]
        except CustodyError as error:
            return [error]

    async def authenticate(self, headers: Mapping[bytes, bytes], *, open: bool, stale: bool = False) -> Caller:
        """The caller of a request with these headers; ANYBODY for an `open` operation. `stale`: use the keys that were
        read last if the database does not answer."""
        return ANYBODY if open else await self.keys.caller(headers, stale=stale)

    async def ping(self) -> None:
        """Raises if the database does not answer. Concurrent calls share one query, because they need no key."""
        if self._pinging is None or self._pinging.done():
            self._pinging = asyncio.ensure_future(in_thread(self.threads.looks, self.engine.ping))
        await asyncio.shield(self._pinging)

    def observe(self, method: str, route: str, status: int, took: float) -> None:
        """Counts an answered request; `took` is in seconds."""
        self.metrics.answered(method, route, status, took)

    async def _overview(self) -> Overview:
        def look() -> Overview:
            topics, groups, outbox = self.engine.overview(timeout=LIMIT)
            return Overview(topics=topics, groups=groups, outbox=outbox, pipelines=self.engine.pipelines())

        return await in_thread(self.threads.looks, look)

    @property
    def stopping(self) -> bool:
        return self._stopping

    def stop(self) -> None:
        """Ends all long polls at once. Requests are still answered."""
        self._stopping = True
        self.long_polls.close()
        self.wakeups.close()

    async def close(self) -> None:
        """Ends the threads after running claims have been answered, so that leases of disconnected clients are given
        back."""
        self._ended.set()
        self._duties.close()
        if self._stop_listening is not None:
            await asyncio.to_thread(self._stop_listening)
        await self.long_polls.served(seconds(self.settings.grace))
        await self.threads.close()
        self.connections.close()

    async def run(self, verb: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs a verb that may take long."""
        return await in_thread(self.threads.slow, verb, *args, **kwargs)

    async def quick(self, verb: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs a quick verb that is not coalesced, such as a nack. It may wait for locks, so few run at a time."""
        async with self.threads.settling:
            return await in_thread(self.threads.quick, verb, *args, **kwargs)

    async def read(self, verb: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs a quick verb that waits for no lock."""
        return await in_thread(self.threads.quick, verb, *args, **kwargs)

    async def append(self, verb: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs a quick verb that may wait for the locks of the topics that it writes to."""
        async with self.threads.appending:
            return await in_thread(self.threads.quick, verb, *args, **kwargs)

    async def claim(self, place: Place, callers: Sequence[Claim]) -> list[Lease]:
        await self.answers.room(self.body_timeout)
        async with self.threads.claiming.turn(place):
            return await in_thread(self.threads.quick, self._claim, place, callers)

    def _claim(self, place: Place, callers: Sequence[Claim]) -> list[Lease]:
        claim = partial(self.verbs.claim_each, place.topic, place.group, place.partition, callers)
        try:
            return claim()
        except GroupNotFound:
            if place.group != DEFAULT_GROUP or not place.create:
                raise
        with suppress(GroupExists):  # another request created it first
            self.engine.create_group(place.topic, place.group)
        return claim()

    async def next_due(self, place: Place) -> float | None:
        return await in_thread(self.threads.quick, self.verbs.next_due_in, place.topic, place.group, place.partition)

    async def give_back(self, lease: Lease) -> None:
        try:
            await in_thread(self.threads.quick, lease.release)
        except LeaseLost:
            pass
        except CustodyError as error:  # its messages come back when the lease expires
            logger.warning("the lease of a disconnected client could not be given back: %s", error)
        else:
            self.long_polls.wake(lease.messages[0].topic)

    async def ack_together(self, acks: Sequence[Ack]) -> list[Settled | CustodyError]:
        """Performs the acks of one request in one transaction, with an answer for each."""
        return await self.quick(self.verbs.ack_each, acks)

    async def place_of(self, lease_id: UUID) -> tuple[str, str, int] | None:
        return await in_thread(self.threads.quick, self.verbs.lease_place, lease_id)
