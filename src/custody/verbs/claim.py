"""Claim: leases messages of one partition."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from operator import attrgetter
from typing import Any, Protocol
from uuid import UUID

import msgspec

from custody.errors import InvalidArgument, LeaseLost
from custody.model.codec import decode
from custody.model.entities import Message, Settled
from custody.model.outcomes import Outcome, failure
from custody.model.policy import Duration, interval
from custody.model.slices import one_by_one
from custody.store.driver_connection import joined
from custody.store.postgres import Database, Row
from custody.verbs.settle import Settler, answer_of, arguments_of, for_each

Which = Message | Iterable[Message]
"""One message, or several. An empty list means none; no argument at all means every message of the lease."""


class Again(Protocol):
    """Repeats the claim of a lease, and settles that lease first if it is given."""

    def __call__(self, *, settle: Lease | None, outcomes: Mapping[int, Outcome] | None) -> Lease: ...


class Lease:
    """Messages that a worker holds until the deadline, to be settled one by one or all at once.

    Without messages it is falsy, and `reason` is `empty`, `busy`, `paused`, `breaker_open`, or the limit that was
    reached. If its claim settled another lease first, `settled` is the answer, and `lost` a LeaseLost if that lease
    no longer held all its messages.
    """

    settled: Settled | None = None
    lost: LeaseLost | None = None

    def __init__(
        self,
        settler: Settler,
        *,
        lease_id: UUID | None,
        deadline: datetime | None,
        messages: Sequence[Message],
        reason: str | None,
        detail: str | None = None,
        again: Again | None = None,
    ) -> None:
        self._settler = settler
        self._again = again
        self._open: set[int] | None = None  # once some were settled: the offsets that were not
        self._lease_id = lease_id
        self._deadline = deadline
        self.messages = messages
        self.reason = reason
        self.detail = detail

    def __bool__(self) -> bool:
        return bool(self.messages)

    def __len__(self) -> int:
        return len(self.messages)

    def __iter__(self) -> Iterator[Message]:
        return iter(self.messages)

    def __repr__(self) -> str:
        return f"<Lease {self._lease_id} of {len(self)}>" if self else f"<Lease: {self.reason}>"

    @property
    def lease_id(self) -> UUID:
        if self._lease_id is None:
            raise LeaseLost(f"there is no lease: the claim was answered {self.reason!r}", "Check `if lease:` first.")
        return self._lease_id

    @property
    def deadline(self) -> datetime:
        if self._deadline is None:
            raise LeaseLost(f"there is no lease: the claim was answered {self.reason!r}", "Check `if lease:` first.")
        return self._deadline

    # Without messages a verb settles all that were delivered and are not settled yet. If some of these are lost, the
    # others are settled, and LeaseLost names the lost ones.
    # `connection`: the caller's own, of psycopg, SQLAlchemy or Django, to the same database. The settle is then part of
    # its transaction, all or nothing: after a LeaseLost the transaction can only be rolled back, to a savepoint or as a
    # whole.

    def ack(self, *messages: Which, connection: Any = None) -> Settled:
        """Marks messages as done: these, or all that are not settled."""
        return self._settle(messages, Outcome("ack"), connection)

    def nack(
        self,
        *messages: Which,
        error: str | BaseException | None = None,
        delay: Duration | None = None,
        requeue: bool = True,
        connection: Any = None,
    ) -> Settled:
        """Marks messages as failed. They are retried by the policy, or after `delay`. They are dead at the limit of the
        policy, or at once with `requeue=False`. Of an exception, the end of its traceback is kept, too."""
        said = failure(error) if isinstance(error, BaseException) else Outcome("nack", error=error)
        outcome = replace(said, kind="nack" if requeue else "reject", delay=delay)
        return self._settle(messages, outcome, connection)

    def release(self, *messages: Which, connection: Any = None) -> Settled:
        """Gives messages back: they are ready at once, and the delivery does not count as an attempt."""
        return self._settle(messages, Outcome("release"), connection)

    def later(self, *messages: Which, after: Duration, connection: Any = None) -> Settled:
        """Postpones messages: they are ready again after that time, and the delivery does not count as an attempt."""
        return self._settle(messages, Outcome("later", delay=after), connection)

    def skip(self, *messages: Which, reason: str | None = None, connection: Any = None) -> Settled:
        """Skips messages that are not needed: they count as done, and the journal has the reason."""
        return self._settle(messages, Outcome("skip", error=reason), connection)

    def _settle(self, messages: Sequence[Which], outcome: Outcome, connection: Any) -> Settled:
        offsets = offsets_of(messages)
        outcomes = for_each(offsets, outcome)
        if connection is None:
            settled = self._settler.settle(self.lease_id, outcomes)
        else:
            with joined(connection) as on:
                settled = replace(self._settler, connection=on).settle(self.lease_id, outcomes)
        if offsets is None:
            self._open = set()
        else:
            if self._open is None:
                self._open = {message.offset for message in self.messages}
            self._open.difference_update(offsets, settled.released)
        return settled

    def next(self, outcomes: Mapping[int, Outcome] | None = None) -> Lease:
        """Acks what was not settled, and claims again as this lease was claimed: one transaction, one round trip.

        With `outcomes` it settles instead the messages that they name by offset, as `Custody.settle` does. `settled`
        and `lost` of the new lease are the answer to that. If the claim is refused, nothing is settled.
        """
        if self._again is None:
            raise InvalidArgument("this lease cannot be claimed again", "Use `claim(…, settle=lease)`.")
        if outcomes is not None:
            return self._again(settle=self if outcomes else None, outcomes=outcomes or None)
        return self._again(settle=self if self and self._open != set() else None, outcomes=None)

    def extend(self, timeout: Duration | None = None, *, message: Message | None = None) -> datetime:
        """Sets the deadline to now plus the timeout, for the lease or for one of its messages.

        In an ordered group the other messages of its key in the lease are extended too.
        """
        deadline = self._settler.extend(self.lease_id, timeout, None if message is None else message.offset)
        if message is None:
            self._deadline = deadline
        return deadline


def offsets_of(which: Sequence[Which]) -> list[int] | None:
    """The offsets of the messages; None, which means the whole lease, without arguments."""
    if not which:
        return None
    return [message.offset for some in which for message in ((some,) if isinstance(some, Message) else some)]


def claim(
    db: Database,
    settler: Settler,
    topic: str,
    group: str,
    *,
    max_messages: int,
    visibility_timeout: Duration | None,
    partition: int | None,
    settle: Lease | UUID | None,
    outcomes: Mapping[int, Outcome] | None,
) -> Lease:
    settle_id = id_of(settle)
    require_lease_of(outcomes, settle_id)
    rows = db.call(
        "claim",
        topic=topic,
        group=group,
        max=max_messages,
        visibility=interval(visibility_timeout),
        partition=partition,
        settle=settle_id,
        slices=True,
        **(arguments_of(outcomes) if outcomes is not None else {}),
    )
    again = partial(
        claim,
        db,
        settler,
        topic,
        group,
        max_messages=max_messages,
        visibility_timeout=visibility_timeout,
        partition=partition,
    )
    lease = lease_of(settler, topic, rows, again=again)
    if settle_id is not None:
        lease.settled, lease.lost = answer_of(settle_id, **rows[0][0]["settled"])
    return lease


def id_of(lease: Lease | UUID | None) -> UUID | None:
    """The id of the lease that a claim settles first, if it is to settle one."""
    if isinstance(lease, Lease):
        return lease.lease_id
    if lease is not None and not isinstance(lease, UUID):
        raise InvalidArgument(f"settle is a lease or its id, not {type(lease).__name__}")
    return lease


def require_lease_of(outcomes: Mapping[int, Outcome] | None, settle_id: UUID | None) -> None:
    if outcomes is not None and settle_id is None:
        raise InvalidArgument("outcomes need the lease that they settle", "Use `claim(…, settle=lease, outcomes=…)`.")


def lease_of(
    settler: Settler,
    topic: str,
    rows: Sequence[Row],
    decode: Callable[[str, bytes], Any] = decode,
    again: Again | None = None,
) -> Lease:
    """Makes a lease of the rows of a claim. `decode` makes a payload of its kind and bytes."""
    found = rows[0][0]
    if "lease_id" not in found:
        return Lease(
            settler,
            lease_id=None,
            deadline=None,
            messages=[],
            reason=found["reason"],
            detail=found["detail"],
            again=again,
        )
    messages = _messages(topic, UUID(found["topic_uid"]), found["partition"], rows, decode)
    if (priority := found["priority"]) is not None:
        messages = [msgspec.structs.replace(message, priority=priority) for message in messages]
    return Lease(
        settler,
        lease_id=UUID(found["lease_id"]),
        deadline=datetime.fromisoformat(found["deadline"]),
        messages=messages,
        reason=None,
        again=again,
    )


def _messages(
    topic: str, uid: UUID, partition: int, rows: Sequence[Row], decode: Callable[[str, bytes], Any]
) -> list[Message]:
    """The messages in the rows of a claim after the first. One loop, for messages that are rows without calls, because
    consumers spend most of their time here."""
    found = [
        Message(
            topic=topic,
            partition=partition,
            offset=number,
            key=key,
            payload=data if kind == "b" else decode(kind, data),
            headers=headers or {} if attempt == 1 else redelivery_headers(headers, attempt, first, error),
            attempt=attempt,
            published_at=published_at,
            topic_uid=uid,
        )
        for _, offset, published_at, whole_key, kinds, payload, each, attempt, first, error, ends, keys in rows[1:]
        for number, key, kind, data, headers in (
            ((offset, whole_key, kinds, payload, each),)
            if ends is None
            else one_by_one(offset, whole_key, kinds, payload, each, ends, keys)
        )
    ]
    if any(row[10] is not None for row in rows):
        found.sort(key=attrgetter("offset"))
    return found


def redelivery_headers(
    headers: dict[str, str] | None, attempt: int, first_delivery: datetime | None, last_error: str | None
) -> dict[str, str]:
    """Adds headers about earlier deliveries to those of a redelivered message."""
    found = {**(headers or {}), "x-custody-delivery-count": str(attempt)}
    if first_delivery is not None:
        found["x-custody-first-delivery"] = first_delivery.isoformat()
    if last_error is not None:
        found["x-custody-last-error"] = last_error
    return found
