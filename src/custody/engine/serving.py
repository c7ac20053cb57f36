"""Verbs for a server, which acts for many callers: several requests at once, under the name of each."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from uuid import UUID

from msgspec import UnsetType

from custody import coalesced
from custody.coalesced import Ack, Claim, Placed, Publish
from custody.engine import Custody
from custody.errors import CustodyError
from custody.model.codec import decode_raw
from custody.model.entities import Group, Replayed, Settled, Topic
from custody.model.policy import Policy
from custody.model.retention import Retention
from custody.model.routing import Binding
from custody.outbox import moving
from custody.store.notify import Listener
from custody.verbs.apikeys import Ring, key_of
from custody.verbs.claim import Lease

LARGEST_ANSWER = 16 * 2**20
"""An answer ends with the message that reaches so many bytes of payload."""


class ServerVerbs:
    """What a server asks of an engine for its callers, beside the verbs that everybody has."""

    def __init__(self, engine: Custody) -> None:
        self._engine, self._db, self._now = engine, engine._db, engine._now

    def named(self, worker: str) -> Custody:
        """The engine, open and closed with this one, under another name: what it does is journalled under it.

        JSON payloads are `msgspec.Raw`: they are passed on letter for letter. What it reads ends at LARGEST_ANSWER.
        """
        other = copy.copy(self._engine)
        other.worker, other._decoding, other._max_bytes = worker, decode_raw, LARGEST_ANSWER
        return other

    def publish_each(self, callers: Sequence[Publish], *, patient: bool = True) -> list[Placed | CustodyError]:
        """Many publishes, each all or nothing, of any topics. For each caller its receipts, or why it was refused.

        Not `patient`: whoever would hold up the others is answered `coalesced.BLOCKED`, and nothing was done for it.
        """
        answers = coalesced.Publishes(
            self._db,
            callers,
            layout_of=self._engine._layout_of,
            forget=self._engine._forget,
            patient=patient,
            now=self._now(),
        ).run()
        self._engine.hint(
            {
                topic
                for caller, answer in zip(callers, answers, strict=True)
                if not isinstance(answer, CustodyError)
                for topic, _ in caller.messages
            }
        )
        return answers

    def ack_each(self, callers: Sequence[Ack], *, patient: bool = True) -> list[Settled | CustodyError]:
        """Many acks; for each caller what it settled, or why it was refused; not `patient` as for `publish_each`."""
        return coalesced.ack_each(self._db, callers, patient=patient, now=self._now())

    def claim_each(self, topic: str, group: str, partition: int | None, callers: Sequence[Claim]) -> list[Lease]:
        """Leases for the callers, in their order, until there is nothing left; JSON payloads are `msgspec.Raw`."""
        settler = self._engine._settler()
        return coalesced.claim_each(
            self._db, settler, topic, group, partition, callers, max_bytes=LARGEST_ANSWER, now=self._now()
        )

    def next_due_in(self, topic: str, group: str, partition: int | None) -> float | None:
        """Seconds until something that these callers wait for is due by itself; None if nothing is."""
        due: float | None = self._engine._value("next_due", topic=topic, group=group, partition=partition)
        return due

    def lease_place(self, lease_id: UUID) -> tuple[str, str, int] | None:
        """The topic, group and partition of a lease, or None if it is not known, or not any more."""
        rows = self._db.call("lease_place", lease_id=lease_id)
        return rows[0] if rows else None

    def live_lease(self, topic: str, group: str, partition: int, offset: int) -> UUID:
        """The lease that holds a message now; else `lease_lost`."""
        found: UUID = self._engine._value("live_lease", topic=topic, group=group, partition=partition, offset=offset)
        return found

    def change_group(
        self,
        topic: str,
        group: str,
        change: Callable[[Policy | None], Policy] | None,
        bindings: Iterable[Binding | str] | UnsetType | None,
        *,
        actor: str,
    ) -> Group:
        """Changes fields of a policy, and replaces the bindings unless they are UNSET: both, or nothing."""
        return self.named(actor)._change_group(topic, group, change, bindings)

    def change_topic(self, topic: str, *, partitions: int, retention: Retention | None) -> Topic:
        """More partitions, and what the topic keeps: both, or nothing."""
        return self._engine._change_topic(topic, partitions=partitions, retention=retention)

    def dead_letter_origin(self, dlq_topic: str, partition: int, offset: int) -> tuple[str | None, str | None]:
        """Which topic a copy names as its own, None if it was replayed and is gone; and where it was replayed to."""
        found = self._db.call("dead_letter_origin", dlq_topic=dlq_topic, partition=partition, offset=offset)
        origin, replayed_to = found[0]
        return origin, replayed_to

    def replay_from(
        self,
        origin: str,
        dlq_topic: str,
        partition: int,
        offset: int,
        *,
        target_topic: str | None,
        actor: str,
        reason: str | None,
    ) -> Replayed:
        """As `replay`, for a copy that was found to name this topic as its own; refused if it is another one now."""
        return self.named(actor)._replay(dlq_topic, partition, offset, target_topic, reason, origin=origin)

    def listen_to_all(self, wake: Callable[[str | None], None]) -> Callable[[], None]:
        """Calls `wake` with each topic that has news, and with None when some may have been missed; from another
        thread. Returns what ends it."""
        return Listener(self._engine._listen_url, None, wake).close

    def move_outbox(self) -> int:
        """Moves due events of the outbox into the topics of this database that they are meant for. Returns how many.

        Claims and publishes do it by themselves; this is for whoever serves those who wait.
        """
        return moving.move(self._db, self._now())

    def key_ring(self) -> Ring:
        """The API keys as they are now, to tell who shows one."""
        rows = self._engine._rows("list_api_keys", revoked=False)
        revoked = not rows and bool(self._engine._value("had_api_keys"))
        return Ring(((row["digest"], key_of(row)) for row in rows), revoked=revoked)

    def connections(self) -> tuple[int, int, int, int]:
        """Connections to the database in use, idle, and at most; and how many calls wait for one."""
        return self._db.connections()
