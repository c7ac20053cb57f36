"""Publishes and acks of the threads of one client that share their transactions; see `connect`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING
from uuid import UUID

from custody.coalesced import Ack, Placed, Publish, Publishes, ack_each
from custody.coalesced.shared import Shared
from custody.errors import CustodyError
from custody.model.entities import Settled
from custody.model.outcomes import Outcome
from custody.store.postgres import Database
from custody.verbs.settle import DirectSettler

if TYPE_CHECKING:
    from custody.engine.base import Base

ACKS = 60
"""Most acks of a transaction: each is a subtransaction, of which PostgreSQL caches 64."""


class SharedCommits:
    """What the threads of one client share. A transaction or connection of the caller's is never shared."""

    def __init__(self, db: Database, of: Base) -> None:
        self.publishes: Shared[Publish, Placed] = Shared(
            partial(publish_each, of, patient=False), keys=lambda publish: {topic for topic, _ in publish.messages}
        )
        self.acks: Shared[Ack, Settled] = Shared(
            partial(ack_each, db, patient=False), keys=lambda ack: (ack.lease_id,), slots=2, most=ACKS
        )


def publish_each(of: Base, callers: Sequence[Publish], *, patient: bool) -> list[Placed | CustodyError]:
    """Publishes for many callers, to any topics, each all or nothing. Returns for each its receipts or its error.

    Without `patient`, a publish that would delay the others gets `coalesced.BLOCKED`, and nothing is done for it.
    """
    answers = Publishes(of._db, callers, layout_of=of._layout_of, forget=of._forget, patient=patient).run()
    published = zip(callers, answers, strict=True)
    for topic in {topic for one, answer in published if isinstance(answer, list) for topic, _ in one.messages}:
        of._hints.send(topic)
    return answers


@dataclass(frozen=True, kw_only=True)
class SharingSettler(DirectSettler):
    """Settles whose acks share transactions with those of other threads."""

    acks: Shared[Ack, Settled]

    def settle(self, lease_id: UUID, outcomes: Mapping[int, Outcome] | Outcome) -> Settled:
        alone = partial(super().settle, lease_id, outcomes)
        if self.connection is not None or not outcomes:
            return alone()
        each = [outcomes] if isinstance(outcomes, Outcome) else outcomes.values()
        if any(outcome.kind != "ack" for outcome in each):
            return alone()
        offsets = None if isinstance(outcomes, Outcome) else list(outcomes)
        return self.acks.submit(Ack(lease_id=lease_id, offsets=offsets, worker=self.db.worker), alone)
