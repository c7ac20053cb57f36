"""Acks of many callers in one transaction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from custody.coalesced.blocking import BLOCKED
from custody.errors import Busy, CustodyError, DatabaseUnavailable, by_code
from custody.model.entities import Settled
from custody.store.postgres import Database, Row
from custody.verbs.settle import lease_lost

_ERRORS = by_code()


@dataclass(frozen=True, kw_only=True)
class Ack:
    """One caller's ack: these offsets of a lease, or all that are not settled.

    With a topic and a partition the lease has to be of these. Without a lease it is one message, whichever lease holds
    it now.
    """

    lease_id: UUID | None
    offsets: Sequence[int] | None
    topic: str | None = None
    group: str | None = None
    partition: int | None = None
    worker: str | None = None


def ack_each(
    db: Database, callers: Sequence[Ack], *, patient: bool = True, now: datetime | None
) -> list[Settled | CustodyError]:
    """Many acks in one transaction."""
    answers: dict[int, Settled | CustodyError] = {}
    blocked: list[int] = []
    one_lease = len(callers) == 1 or len({caller.lease_id or object() for caller in callers}) == 1
    try:
        rows = _ack(db, callers, wait=one_lease, now=now)
    except DatabaseUnavailable as error:
        return [error for _ in callers]
    except CustodyError as error:
        if one_lease:  # they have waited for it together: to try again would be to wait again, and in vain
            return [error for _ in callers]
        blocked = list(range(len(callers)))
        rows = []
    for number, settled, lost, already, code, message, remedy in rows:
        if code == "blocked":
            blocked.append(number - 1)
        elif code is not None:
            answers[number - 1] = _ERRORS.get(code, CustodyError)(message, remedy or "")
        elif lost or not settled:
            answers[number - 1] = lease_lost(callers[number - 1].lease_id, lost)
        else:
            answers[number - 1] = Settled(settled=settled, already=already)
    if not patient and len(callers) > 1:
        answers.update(dict.fromkeys(blocked, BLOCKED))
        blocked = []
    busy: dict[UUID | None, CustodyError] = {}
    for n in blocked:
        lease_id = callers[n].lease_id
        answers[n] = answer = busy.get(lease_id) or ack_each(db, [callers[n]], now=now)[0]
        if isinstance(answer, Busy):  # whoever else acks the same lease would wait as long, and in vain
            busy[lease_id] = answer
    return [answers[n] for n in range(len(callers))]


def _ack(db: Database, callers: Sequence[Ack], *, wait: bool, now: datetime | None) -> list[Row]:
    offsets: list[int] = []
    first: list[int | None] = []
    last: list[int | None] = []
    for caller in callers:
        if caller.offsets is None:
            first.append(None)
            last.append(None)
            continue
        first.append(len(offsets) + 1)
        offsets += dict.fromkeys(caller.offsets)
        last.append(len(offsets))
    return db.call(
        "ack_each",
        leases=[caller.lease_id for caller in callers],
        first=first,
        last=last,
        offsets=offsets,
        topics=[caller.topic for caller in callers],
        groups=[caller.group for caller in callers],
        partitions=[caller.partition for caller in callers],
        workers=[caller.worker for caller in callers],
        wait=wait,
        now=now,
    )
