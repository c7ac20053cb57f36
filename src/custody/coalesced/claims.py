"""Claims for many callers in one transaction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from custody.model.codec import decode_raw
from custody.model.policy import Duration, interval
from custody.store.postgres import Database
from custody.verbs.claim import Lease, lease_of
from custody.verbs.settle import Settler


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One caller's claim: how many messages, the timeout of the lease, and the caller's name."""

    max_messages: int = 1
    visibility_timeout: Duration | None = None
    worker: str | None = None


def claim_each(
    db: Database,
    settler: Settler,
    topic: str,
    group: str,
    partition: int | None,
    callers: Sequence[Claim],
    *,
    max_bytes: int | None = None,
) -> list[Lease]:
    """Leases for several callers, in their order, until no message is left: then the last lease is empty and has the
    reason. Each ends with the message that reaches `max_bytes` of payload. JSON payloads stay raw."""
    rows = db.call(
        "claim_each",
        topic=topic,
        group=group,
        partition=partition,
        max=[caller.max_messages for caller in callers],
        visibility=[interval(caller.visibility_timeout) for caller in callers],
        workers=[caller.worker for caller in callers],
        bytes=max_bytes,
    )
    return [
        lease_of(settler, topic, [row[1:] for row in some], decode_raw)
        for _, some in groupby(rows, key=lambda row: row[0])
    ]
