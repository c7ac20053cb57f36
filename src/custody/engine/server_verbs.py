"""Verbs that only a server needs, as it acts for many callers: batches of requests, each under its caller's name."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from uuid import UUID

from custody import coalesced
from custody.coalesced import Ack, Claim, Placed, Publish
from custody.engine import Custody
from custody.engine.sharing import publish_each
from custody.errors import CustodyError
from custody.model.codec import decode_raw
from custody.model.entities import Replayed, Settled
from custody.outbox.to_topics import move_to_topics
from custody.store.notify import Listener
from custody.verbs.apikeys import KnownKeys, key_of
from custody.verbs.claim import Lease

LARGEST_ANSWER = 16 * 2**20
"""Bytes of payload: an answer ends with the message that reaches this size."""


class ServerVerbs:
    """The verbs of a server, in addition to those of the façade."""

    def __init__(self, engine: Custody) -> None:
        self._engine, self._db = engine, engine._db

    def named(self, worker: str) -> Custody:
        """The same engine under another name, which the journal records. It shares the connections of this one.

        JSON payloads are `msgspec.Raw`: they are passed on byte for byte. Lists of messages end at LARGEST_ANSWER.
        """
        other = copy.copy(self._engine)
        other.worker, other._db = worker, self._db.acting(worker, self._db.clock)
        other._decoding, other._max_bytes = decode_raw, LARGEST_ANSWER
        return other

    def publish_each(self, callers: Sequence[Publish], *, patient: bool = True) -> list[Placed | CustodyError]:
        """See `sharing.publish_each`."""
        return publish_each(self._engine, callers, patient=patient)

    def ack_each(self, callers: Sequence[Ack], *, patient: bool = True) -> list[Settled | CustodyError]:
        """Acks for many callers. Returns for each what it settled, or its error. `patient`: see `publish_each`."""
        return coalesced.ack_each(self._db, callers, patient=patient)

    def claim_each(self, topic: str, group: str, partition: int | None, callers: Sequence[Claim]) -> list[Lease]:
        """Claims for many callers, in their order, until no message is left. JSON payloads are `msgspec.Raw`."""
        settler = self._engine._settler()
        return coalesced.claim_each(self._db, settler, topic, group, partition, callers, max_bytes=LARGEST_ANSWER)

    def next_due_in(self, topic: str, group: str, partition: int | None) -> float | None:
        """Seconds until the next timed event of a group, or of one of its partitions; None if there is none."""
        due: float | None = self._engine._value("next_due", topic=topic, group=group, partition=partition)
        return due

    def lease_place(self, lease_id: UUID) -> tuple[str, str, int] | None:
        """The topic, group and partition of a lease; None if the lease does not exist (any more)."""
        rows = self._db.call("lease_place", lease_id=lease_id)
        return rows[0] if rows else None

    def live_lease(self, topic: str, group: str, partition: int, offset: int) -> UUID:
        """The lease that holds a message now; `lease_lost` if there is none."""
        found: UUID = self._engine._value("live_lease", topic=topic, group=group, partition=partition, offset=offset)
        return found

    def dead_letter_origin(self, dlq_topic: str, partition: int, offset: int) -> tuple[str | None, str | None]:
        """The topic that a dead letter came from (None if it was replayed and is gone), and where the replay went."""
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
        """`replay` of a dead letter whose origin the caller has looked up; refused if it has another origin now."""
        return self.named(actor)._replay(dlq_topic, partition, offset, target_topic, reason, origin=origin)

    def listen_to_all(self, wake: Callable[[str | None], None]) -> Callable[[], None]:
        """Calls `wake` with each topic that something is published in, and with None when wake-ups may have been
        missed, from another thread. Returns a function that ends it."""
        return Listener(self._engine._listen_url, None, wake).close

    def move_outbox(self) -> int:
        """Moves due events of the outbox into topics of this database. Returns how many.

        Claims and publishes do that by themselves; a server does it for clients that only wait.
        """
        return move_to_topics(self._db)

    def key_ring(self) -> KnownKeys:
        """Reads the API keys, to authenticate callers."""
        rows = self._engine._rows("list_api_keys", revoked=False)
        revoked = not rows and bool(self._engine._value("had_api_keys"))
        return KnownKeys(((row["digest"], key_of(row)) for row in rows), revoked=revoked)

    def connections(self) -> tuple[int, int, int, int]:
        """Connections to the database: in use, idle, the limit, and how many calls wait for one."""
        return self._db.connections()
