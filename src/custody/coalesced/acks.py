"""Acks of many callers in one transaction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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

    If topic and partition are given, the lease has to belong to them. Without a lease it is an ack of one message,
    whichever lease holds it now.
    """

    lease_id: UUID | None
    offsets: Sequence[int] | None
    topic: str | None = None
    group: str | None = None
    partition: int | None = None
    worker: str | None = None


def ack_each(db: Database, callers: Sequence[Ack], *, patient: bool = True) -> list[Settled | CustodyError]:
    """Performs many acks in one transaction. Without `patient`, acks that would wait for a lock get `BLOCKED`."""
    answers: dict[int, Settled | CustodyError] = {}
    blocked: list[int] = []
    one_lease = len(callers) == 1 or len({caller.lease_id or object() for caller in callers}) == 1
    try:
        rows = _ack(db, callers, wait=one_lease)
    except DatabaseUnavailable as error:
        return [error for _ in callers]
    except CustodyError as error:
        if one_lease:  # they have already waited for the lock: another try would only wait again
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
        answers[n] = answer = busy.get(lease_id) or ack_each(db, [callers[n]])[0]
        if isinstance(answer, Busy):  # other acks of this lease would wait for the same lock
            busy[lease_id] = answer
    return [answers[n] for n in range(len(callers))]


def _ack(db: Database, callers: Sequence[Ack], *, wait: bool) -> list[Row]:
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
    )
