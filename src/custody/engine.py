"""The façade: every verb of Custody in one place. Doors call this and nothing below it."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from datetime import datetime
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self
from uuid import UUID

import msgspec

from custody import claim, insights, log, pipelines, producer, redrive
from custody.claim import Lease
from custody.errors import InvalidArgument, TopicChanged
from custody.insights import HandlingTime, Server
from custody.model import (
    BlockedKey,
    DeadLetter,
    Group,
    HistoryEntry,
    Message,
    Outgoing,
    Payload,
    Producer,
    Receipt,
    Rewound,
    Settled,
    Stats,
    Topic,
)
from custody.outcomes import Outcome
from custody.pipelines import Drive, Driver, Figures, Pass
from custody.policy import Duration, Policy, did_you_mean, seconds
from custody.producer import IdempotentProducer
from custody.redrive import DeadFilter
from custody.settle import Settler
from custody.store.embedded import EmbeddedServer
from custody.store.notify import Hints, Listener
from custody.store.postgres import Connection, Database
from custody.worker import Summary, Worker
from custody.worker.calling import Handler
from custody.worker.signals import stopped_by_signals

Start = Literal["earliest", "latest"] | int | datetime
"""Where a new group starts: at the first message, after the last one, at an offset, or at a time."""


class Custody:
    """An open Custody. Safe for use by many threads; close it, or use it as a context manager."""

    def __init__(
        self,
        db: Database,
        *,
        server: EmbeddedServer | None = None,
        defaults: Policy | None = None,
        worker: str | None = None,
        clock: Callable[[], datetime] | None = None,
    ) -> None:
        self._db = db
        self._server = server
        self._defaults = defaults or Policy()
        self._clock = clock
        self._partitions: dict[str, int] = {}
        self._hints = Hints(db.url)
        self.worker = worker or f"{socket.gethostname()}:{os.getpid()}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Gives the connections back; the last user of an embedded database stops it."""
        self._hints.close()
        self._db.close()
        if self._server is not None:
            self._server.close()

    @property
    def database_url(self) -> str:
        """The libpq URL in use."""
        return self._db.url

    def _now(self) -> datetime | None:
        return None if self._clock is None else self._clock()

    # topics and the log

    def create_topic(self, name: str, *, partitions: int = 1, max_depth: int | None = None) -> Topic:
        """A new topic. `max_depth` caps what the slowest group has not resolved, for each partition."""
        log.create_topic(self._db, name, partitions=partitions, max_depth=max_depth, now=self._now())
        self._partitions.pop(name, None)
        return self.topic(name)

    def delete_topic(self, name: str) -> None:
        """Removes a topic with its messages and groups, for good."""
        log.delete_topic(self._db, name)
        self._partitions.pop(name, None)

    def topics(self) -> list[Topic]:
        return log.topics(self._db)

    def topic(self, name: str) -> Topic:
        return log.topic(self._db, name)

    def publish(
        self,
        topic: str,
        payload: Payload,
        *,
        key: str | None = None,
        headers: Mapping[str, str] | None = None,
        partition: int | None = None,
        expected_offset: int | None = None,
    ) -> Receipt:
        """Appends one message; it is durable when this returns. `expected_offset` refuses if the partition moved on."""
        message = Outgoing(payload, key=key, headers=headers, partition=partition)
        return self.publish_many(topic, [message], expected_offset=expected_offset)[0]

    def publish_many(
        self,
        topic: str,
        messages: Iterable[Outgoing | Payload],
        *,
        expected_offset: int | None = None,
        producer_id: str | None = None,
        epoch: int | None = None,
        sequence: int | None = None,
    ) -> list[Receipt]:
        """Appends the messages in one transaction: all of them or none, in this order for each partition.

        With `producer_id`, `epoch` and `sequence` (of the first message) a repeat returns the first receipts.
        """
        batch = [message if isinstance(message, Outgoing) else Outgoing(message) for message in messages]
        identity = None
        if producer_id is not None:
            if epoch is None or sequence is None:
                raise InvalidArgument("an idempotent publish needs producer_id, epoch and sequence")
            identity = (producer_id, epoch, sequence)
        publish = partial(
            log.publish, self._db, topic, batch, producer=identity, expected_offset=expected_offset, now=self._now()
        )
        try:
            receipts = publish(partitions=self._partitions_of(topic))
        except TopicChanged:  # since we last looked
            self._partitions.pop(topic, None)
            receipts = publish(partitions=self._partitions_of(topic))
        self._hints.send(topic)
        return receipts

    def _partitions_of(self, topic: str) -> int:
        count = self._partitions.get(topic)
        if count is None:
            count = self._partitions[topic] = self.topic(topic).partitions
        return count

    def read(
        self,
        topic: str,
        partition: int = 0,
        *,
        offset: int | None = None,
        time: datetime | None = None,
        max_messages: int = 100,
    ) -> list[Message]:
        """Messages as they are in the log, from an offset or a time on (else from the first); no group is involved."""
        if time is not None:
            if offset is not None:
                raise InvalidArgument("read takes an offset or a time, not both")
            offset = log.offset_at(self._db, topic, partition, time)
        return log.read(self._db, topic, partition, offset=offset, max_messages=max_messages)

    def producer(self, producer_id: str) -> Producer:
        """Where an idempotent producer stands: the way out after a publish whose answer was lost."""
        return producer.producer_state(self._db, producer_id)

    def init_producer(self, producer_id: str) -> IdempotentProducer:
        """Takes over as this producer: a new epoch, sequence 0; older instances are fenced from now on."""
        return IdempotentProducer(producer.init_producer(self._db, producer_id, now=self._now()), self.publish_many)

    # groups

    def create_group(
        self, topic: str, group: str, policy: Policy | None = None, *, start: Start = "earliest", bare: bool = False
    ) -> Group:
        """A new group. Without a policy it has the defaults; a bare one is only a cursor (`fetch`, `commit`)."""
        if bare and policy is not None:
            raise InvalidArgument("a bare group has no policy")
        how, offset, time = _start(start)
        row = self._db.call_dicts(
            "create_group",
            topic=topic,
            group=group,
            policy=_policy(policy or self._defaults),
            start=how,
            start_offset=offset,
            start_time=time,
            bare=bare,
            now=self._now(),
        )[0]
        return insights.describe_group(topic, row)

    def update_group(self, topic: str, group: str, policy: Policy) -> Group:
        """Replaces the policy of a group, for everything that happens from now on. Its ordering stays."""
        row = self._db.call_dicts(
            "update_group", topic=topic, group=group, policy=_policy(policy), actor=self.worker, now=self._now()
        )[0]
        return insights.describe_group(topic, row)

    def delete_group(self, topic: str, group: str) -> None:
        self._db.call("delete_group", topic=topic, group=group)

    def groups(self, topic: str) -> list[Group]:
        return insights.groups(self._db, topic)

    def group(self, topic: str, group: str) -> Group:
        return insights.describe_group(topic, self._db.call_dicts("group_named", topic=topic, group=group)[0])

    def pause(self, topic: str, group: str, *, reason: str | None = None) -> bool:
        """Stops handing out messages; what is in flight can be settled. False if it was paused already."""
        return bool(
            self._db.call("pause", topic=topic, group=group, reason=reason, actor=self.worker, now=self._now())[0][0]
        )

    def resume(self, topic: str, group: str) -> bool:
        """Goes on after a pause, and closes an open circuit breaker. False if there was nothing to resume."""
        return bool(self._db.call("resume", topic=topic, group=group, actor=self.worker, now=self._now())[0][0])

    def fetch(self, topic: str, group: str, partition: int = 0, *, max_messages: int = 100) -> list[Message]:
        """For a bare group: the messages after its committed position. Nothing is recorded until `commit`."""
        positions: dict[int, int] = dict(self._db.call("positions", topic=topic, group=group))
        if partition not in positions:
            self.read(topic, partition, max_messages=1)  # refuses a partition that is not there
        return log.read(self._db, topic, partition, offset=positions[partition], max_messages=max_messages)

    def commit(self, topic: str, group: str, partition: int, next_offset: int) -> None:
        """For a bare group: everything below `next_offset` is done."""
        self._db.call(
            "commit_position",
            topic=topic,
            group=group,
            partition=partition,
            offset=next_offset,
            worker=self.worker,
            now=self._now(),
        )

    # the lifecycle

    def claim(
        self,
        topic: str,
        group: str,
        *,
        max_messages: int = 1,
        visibility_timeout: Duration | None = None,
        partition: int | None = None,
    ) -> Lease:
        """Up to `max_messages` of one partition under one lease. An empty lease is false and has a `reason`."""
        return claim.claim(
            self._db,
            self._settler(),
            topic,
            group,
            max_messages=max_messages,
            visibility_timeout=visibility_timeout,
            partition=partition,
            worker=self.worker,
            now=self._now(),
        )

    def _settler(self, connection: Connection | None = None) -> Settler:
        return Settler(db=self._db, worker=self.worker, clock=self._clock, connection=connection)

    def ack(self, lease_id: UUID, offsets: Sequence[int] | None = None) -> Settled:
        """Done: these offsets, or all that the lease still holds."""
        return self._settler().ack(lease_id, offsets)

    def nack(
        self,
        lease_id: UUID,
        offsets: Sequence[int] | None = None,
        *,
        error: str | None = None,
        delay: Duration | None = None,
        requeue: bool = True,
    ) -> Settled:
        """Failed: tried again by the policy, or dead at once with `requeue=False`."""
        return self._settler().nack(lease_id, offsets, error=error, delay=delay, requeue=requeue)

    def release(self, lease_id: UUID, offsets: Sequence[int] | None = None) -> Settled:
        """Given back: ready at once, and the delivery does not count."""
        return self._settler().release(lease_id, offsets)

    def later(self, lease_id: UUID, offsets: Sequence[int] | None = None, *, after: Duration) -> Settled:
        """Not now: ready again after that time, and the delivery does not count."""
        return self._settler().later(lease_id, offsets, after=after)

    def settle(self, lease_id: UUID, outcomes: Mapping[int, Outcome]) -> Settled:
        """Many outcomes at once, by offset: one statement, one commit."""
        return self._settler().settle(lease_id, outcomes)

    def extend(self, lease_id: UUID, timeout: Duration | None = None, *, offset: int | None = None) -> datetime:
        """Sets the deadline to now plus the timeout, for the lease or one of its messages."""
        return self._settler().extend(lease_id, timeout, offset)

    def work(
        self,
        topic: str,
        group: str,
        handler: Handler,
        *,
        concurrency: int = 8,
        max_messages: int | None = None,
        visibility_timeout: Duration | None = None,
        poll: Duration = "1s",
        grace: Duration = "30s",
    ) -> Summary:
        """Claims, calls the handler, settles, until stopped by SIGTERM or Ctrl-C: keys in parallel, one key in order.

        The handler is a function or a coroutine function of one message. Returning is done; an exception is a failure;
        `Retry`, `Dead` and `Later` say more. Leases are extended while handlers run, up to `handler_timeout`.
        A stop lets running handlers finish for `grace` and gives back the rest. `worker_for` gives a handle instead.
        """
        worker = self.worker_for(
            topic,
            group,
            handler,
            concurrency=concurrency,
            max_messages=max_messages,
            visibility_timeout=visibility_timeout,
            poll=poll,
            grace=grace,
        )
        with stopped_by_signals(worker.stop):
            return worker.run()

    def worker_for(self, topic: str, group: str, handler: Handler, **settings: Any) -> Worker:
        """A worker to be run in a thread of yours and stopped by its `stop()`; the settings are those of `work`."""
        return Worker(self, topic, group, handler, **settings)

    def next_due(self, topic: str, group: str) -> float | None:
        """Seconds until something of the group is due by itself: a retry, an expiring lease, or, while the circuit
        breaker is open, its next probe. None if nothing is, or while the group is paused.
        """
        due: float | None = self._db.call("next_due", topic=topic, group=group, now=self._now())[0][0]
        return due

    def listen(self, topic: str, wake: Callable[[], None]) -> Callable[[], None]:
        """Calls `wake` soon after each publish to the topic, from another thread. Returns what ends it."""
        return Listener(self._db.url, topic, wake).close

    def drive(
        self, topic: str, group: str, *, visibility_timeout: Duration | None = None, after: int | None = None
    ) -> tuple[Drive, Pass]:
        """Takes over a group as its pipeline's driver: claims in numbered batches, commits with what is published.

        Whoever drove it before is fenced (`pipeline_fenced`), and its claim is taken over. With `after` only the driver
        of that epoch may have been before: else it is this one that is fenced. See `custody.spark`.
        """
        visibility = None if visibility_timeout is None else seconds(visibility_timeout)
        return pipelines.start(
            self._db, topic, group, driver=self.worker, visibility=visibility, after=after, clock=self._clock
        )

    def figures(self, topic: str, group: str) -> Figures:
        """Where a pipeline's group stands, and what its last batch came to."""
        return pipelines.figures(self._db, topic, group, now=self._now())

    def hint(self, topics: Iterable[str]) -> None:
        """Wakes those who wait for messages of these topics, after something was published in another way."""
        for topic in topics:
            self._hints.send(topic)

    def driving(self, driver: Driver) -> Drive:
        """The verbs of a driver that has taken over already, for another process of its own."""
        return Drive(self._db, driver, self._clock)

    # operators

    def dead(self, topic: str, group: str, *, limit: int = 1000) -> list[DeadLetter]:
        """The dead letters of a group, with payload and errors."""
        return insights.dead(self._db, topic, group, limit=limit)

    def redrive(
        self, topic: str, group: str, *, dry_run: bool = False, reason: str | None = None, **which: Any
    ) -> list[tuple[int, int]]:
        """Dead messages become ready with a fresh budget: all, or those that a filter (see DeadFilter) picks.

        Returns (partition, offset) of each; with `dry_run` nothing changes.
        """
        chosen = _dead_filter(which)
        return redrive.settle_dead(
            self._db,
            "redrive",
            topic,
            group,
            chosen,
            dry_run=dry_run,
            actor=self.worker,
            reason=reason,
            now=self._now(),
        )

    def discard(
        self, topic: str, group: str, *, dry_run: bool = False, reason: str | None = None, **which: Any
    ) -> list[tuple[int, int]]:
        """Dead messages are given up for good, with the same filters as `redrive`."""
        chosen = _dead_filter(which)
        return redrive.settle_dead(
            self._db,
            "discard",
            topic,
            group,
            chosen,
            dry_run=dry_run,
            actor=self.worker,
            reason=reason,
            now=self._now(),
        )

    def rewind(
        self,
        topic: str,
        group: str,
        *,
        to_offset: int | None = None,
        to_time: datetime | None = None,
        partition: int | None = None,
        dry_run: bool = False,
        reason: str | None = None,
    ) -> list[Rewound]:
        """Everything from an offset or a time on is delivered again; leases over it are revoked."""
        return redrive.rewind(
            self._db,
            topic,
            group,
            to_offset=to_offset,
            to_time=to_time,
            partition=partition,
            dry_run=dry_run,
            actor=self.worker,
            reason=reason,
            now=self._now(),
        )

    def blocked_keys(self, topic: str, group: str, *, limit: int = 1000) -> list[BlockedKey]:
        """Keys that cannot go on, what each waits for, and how much waits behind it."""
        return insights.blocked_keys(self._db, topic, group, limit=limit)

    def release_key(self, topic: str, group: str, key: str, *, reason: str | None = None) -> int:
        """Lets a key go on past its held dead messages, which stay dead. Returns how many there were."""
        return redrive.release_key(self._db, topic, group, key, actor=self.worker, reason=reason, now=self._now())

    def skip(self, topic: str, group: str, partition: int, offset: int, *, reason: str | None = None) -> None:
        """Counts one waiting or dead message as done."""
        redrive.skip(self._db, topic, group, partition, offset, actor=self.worker, reason=reason, now=self._now())

    def stats(self, topic: str, group: str) -> Stats:
        return insights.stats(self._db, topic, group, now=self._now())

    def trace(self, topic: str, partition: int, offset: int, *, group: str | None = None) -> list[HistoryEntry]:
        """Everything that happened to one message, oldest first."""
        return insights.trace(self._db, topic, partition, offset, group=group)

    def handling_times(self, topic: str | None = None, group: str | None = None) -> list[HandlingTime]:
        """How long recent leases took, for each group: what a visibility timeout has to cover."""
        return insights.handling_times(self._db, topic, group, now=self._now())

    def server(self) -> Server:
        """The server's version, the settings that durability rests on, and transactions that are open for long."""
        return insights.server(self._db)


def _policy(policy: Policy) -> str:
    return msgspec.json.encode(policy.columns()).decode()


def _dead_filter(which: Mapping[str, Any]) -> DeadFilter:
    known = [field.name for field in fields(DeadFilter)]
    for name in which:
        if name not in known:
            raise InvalidArgument(f"dead letters cannot be chosen by {name!r}", did_you_mean(name, known))
    return DeadFilter(**which)


def _start(start: Start) -> tuple[str, int | None, datetime | None]:
    if isinstance(start, datetime):
        log.require_zone(start)
        return "time", None, start
    if isinstance(start, int) and not isinstance(start, bool):
        return "offset", start, None
    return str(start), None, None
