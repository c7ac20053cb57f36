"""What a server asks for many callers at once: one transaction and one fsync for all, and for each its own answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import groupby
from typing import Any
from uuid import UUID

from custody import delays
from custody.claim import Lease, lease_of
from custody.errors import Busy, CustodyError, DatabaseUnavailable, InvalidArgument, LeaseLost, by_code
from custody.log import Encoded, Layout, arrays, decode_raw, encode_message, place
from custody.model import Delayed, Outgoing, Receipt, Settled
from custody.policy import Duration, seconds
from custody.settle import REMEDY, Settler, listed
from custody.store.postgres import Database, Row

_ERRORS = by_code()
_PLACED_WRONGLY = {"topic_changed", "no_priorities"}
Placed = list[Receipt | Delayed]
BLOCKED = Busy("somebody holds what this needs, and nothing was done")
"""The answer to a caller who has to be tried again without others, whom it would hold up."""


@dataclass(frozen=True, kw_only=True)
class Publish:
    """One caller's publish: messages with their topics, all or none. `producer` is its id, epoch and sequence."""

    messages: Sequence[tuple[str, Outgoing]]
    producer: tuple[str, int, int] | None = None
    expected_offset: int | None = None


@dataclass(frozen=True, kw_only=True)
class _Unit:
    """Messages that one call of a verb takes: of one topic, delayed or not."""

    topic: str
    delayed: bool
    layout: Layout
    producer: tuple[str | None, int | None, int | None]
    expected: int | None
    placed: list[int]
    encoded: list[Encoded]
    messages: list[Outgoing]


@dataclass(frozen=True, kw_only=True)
class _Bundle:
    """Units that stand or fall together: those of one caller, or the only ones of several, joined. `shares` says how
    many messages are whose."""

    shares: list[tuple[int, int]]
    units: list[_Unit] = field(default_factory=list)


class Publishes:
    """Many publishes in one transaction. A refusal is its caller's own: the others go on as if it were not there."""

    def __init__(
        self,
        db: Database,
        callers: Sequence[Publish],
        *,
        layout_of: Callable[[str], Layout],
        forget: Callable[[str], object],
        patient: bool,
        now: datetime | None,
    ) -> None:
        self._db, self._callers, self._now, self._patient = db, callers, now, patient
        self._layout_of, self._forget = layout_of, forget
        self._answers: dict[int, Placed | CustodyError] = {}

    def run(self) -> list[Placed | CustodyError]:
        everybody = range(len(self._callers))
        topics = {topic for caller in self._callers for topic, _ in caller.messages}
        self._publish(self._bundles(everybody, joined=True), wait=len(topics) < 2 or len(self._callers) == 1)
        return [self._answers[n] for n in everybody]

    def _bundles(self, callers: Iterable[int], *, joined: bool) -> list[_Bundle]:
        bundles: list[_Bundle] = []
        joins: dict[str, _Bundle] = {}
        for n in callers:
            try:
                units = list(self._units(self._callers[n]))
            except CustodyError as error:
                self._answers[n] = error
                continue
            if not units:
                self._answers[n] = []
                continue
            first, share = units[0], (n, len(self._callers[n].messages))
            plain = len(units) == 1 and not first.delayed and first.producer[0] is None and first.expected is None
            if joined and plain and first.topic in joins:
                bundle = joins[first.topic]
                bundle.shares.append(share)
                for mine, theirs in (
                    (bundle.units[0].placed, first.placed),
                    (bundle.units[0].encoded, first.encoded),
                    (bundle.units[0].messages, first.messages),
                ):
                    mine.extend(theirs)  # type: ignore[arg-type]
                continue
            bundles.append(_Bundle(shares=[share], units=units))
            if joined and plain:
                joins[first.topic] = bundles[-1]
        return bundles

    def _units(self, caller: Publish) -> Iterable[_Unit]:
        producer_id, epoch, sequence = caller.producer or (None, None, None)
        if caller.expected_offset is not None and (len({t for t, _ in caller.messages}) > 1 or _any_delayed(caller)):
            raise InvalidArgument(
                "expected_offset needs messages of one partition, without a delay", "Publish them by themselves."
            )
        for (topic, delayed), run in groupby(caller.messages, key=lambda one: (one[0], one[1].delayed)):
            messages = [message for _, message in run]
            if delayed:
                for message in messages:
                    delays.require_time(message)
            layout = self._layout_of(topic)
            yield _Unit(
                topic=topic,
                delayed=delayed,
                layout=layout,
                producer=(producer_id, epoch, sequence),
                expected=caller.expected_offset,
                placed=place(messages, layout),
                encoded=[encode_message(message) for message in messages],
                messages=messages,
            )
            sequence = None if sequence is None else sequence + len(messages)

    def _publish(self, bundles: list[_Bundle], *, wait: bool, again: bool = True) -> None:
        if not bundles:
            return
        if len(bundles) == 1 and len(bundles[0].units) == 1 and wait:
            self._publish_one(bundles[0], again=again)
            return
        try:
            answers = self._call(bundles, wait)
        except DatabaseUnavailable as error:  # whether it happened is unknown: nobody may try it again for them
            for bundle in bundles:
                self._refuse(bundle, error)
            return
        except CustodyError as error:
            if sum(len(bundle.shares) for bundle in bundles) == 1:
                self._refuse(bundles[0], error)
                return
            for some in self._by_topic(n for bundle in bundles for n, _ in bundle.shares).values():
                self._publish_apart(some)
            return
        apart: list[int] = []
        wrongly: list[int] = []
        blocked: dict[str, list[int]] = {}
        for bundle, (code, message, remedy, placed) in zip(bundles, answers, strict=True):
            callers = [n for n, _ in bundle.shares]
            if code is None:
                self._hand_out(bundle, placed)
            elif code == "blocked":
                blocked.setdefault(bundle.units[0].topic, []).extend(callers)
            elif code in _PLACED_WRONGLY and again:
                for unit in bundle.units:
                    self._forget(unit.topic)
                wrongly += callers
            elif len(callers) > 1:
                apart += callers
            else:
                self._refuse(bundle, _ERRORS.get(code, CustodyError)(message, remedy or ""))
        self._publish(self._bundles(apart, joined=False), wait=wait, again=again)
        self._publish(self._bundles(wrongly, joined=False), wait=True, again=False)
        for some in blocked.values():
            if self._patient:
                self._publish(self._bundles(some, joined=True), wait=True, again=again)
            else:
                self._answers.update(dict.fromkeys(some, BLOCKED))

    def _by_topic(self, callers: Iterable[int]) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for n in callers:
            found.setdefault(self._callers[n].messages[0][0], []).append(n)
        return found

    def _publish_apart(self, callers: Sequence[int]) -> None:
        """One by one; after the first that finds the topic busy the others are told so, for each would wait as long."""
        for number, n in enumerate(callers):
            self._publish(self._bundles([n], joined=False), wait=True)
            if isinstance(error := self._answers[n], Busy):
                self._answers.update(dict.fromkeys(callers[number + 1 :], error))
                return

    def _publish_one(self, bundle: _Bundle, *, again: bool) -> None:
        """Messages of one topic: as if they were one caller's, which costs less. If they are refused, each is tried."""
        callers = [n for n, _ in bundle.shares]
        unit = bundle.units[0]
        try:
            rows = self._call_one(unit)
        except CustodyError as error:
            if isinstance(error, DatabaseUnavailable):
                self._refuse(bundle, error)
            elif error.code in _PLACED_WRONGLY and again:
                self._forget(unit.topic)
                self._publish(self._bundles(callers, joined=True), wait=True, again=False)
            elif len(callers) == 1:
                self._refuse(bundle, error)
            elif isinstance(error, Busy):
                self._publish_apart(callers)
            else:
                self._publish(self._bundles(callers, joined=False), wait=True, again=again)
            return
        self._hand_out(bundle, rows)

    def _call_one(self, unit: _Unit) -> list[Row]:
        producer, epoch, sequence = unit.producer
        given: dict[str, Any] = {
            "topic": unit.topic,
            "partitions": unit.placed,
            **arrays(unit.encoded),
            "producer": producer,
            "epoch": epoch,
            "sequence": sequence,
            "now": self._now,
            "of": unit.layout.partitions,
        }
        if unit.delayed:
            given["deliver_at"] = [message.deliver_at for message in unit.messages]
            given["delays"] = [None if one.delay is None else seconds(one.delay) for one in unit.messages]
            rows = self._db.call("publish_delayed", **given)
            return [(0, partition, number, again, at) for partition, number, at, again in rows]
        rows = self._db.call("publish", **given, expected=unit.expected, priorities=unit.layout.priorities)
        return [(0, partition, offset, again, None) for partition, offset, again in rows]

    def _call(self, bundles: list[_Bundle], wait: bool) -> list[tuple[str | None, str, str | None, list[Row]]]:
        units = [(number, unit) for number, bundle in enumerate(bundles) for unit in bundle.units]
        messages = [message for _, unit in units for message in unit.messages]
        rows = self._db.call(
            "publish_each",
            requests=[number for number, _ in units],
            topics=[unit.topic for _, unit in units],
            delayed=[unit.delayed for _, unit in units],
            producers=[unit.producer[0] for _, unit in units],
            epochs=[unit.producer[1] for _, unit in units],
            sequences=[unit.producer[2] for _, unit in units],
            expected=[unit.expected for _, unit in units],
            of=[unit.layout.partitions for _, unit in units],
            priorities=[unit.layout.priorities for _, unit in units],
            units=[number for number, (_, unit) in enumerate(units, start=1) for _ in unit.messages],
            partitions=[partition for _, unit in units for partition in unit.placed],
            **arrays([encoded for _, unit in units for encoded in unit.encoded]),
            deliver_at=[message.deliver_at for message in messages],
            delays=[None if message.delay is None else seconds(message.delay) for message in messages],
            wait=wait,
            now=self._now,
        )
        answers: list[tuple[str | None, str, str | None, list[Row]]] = [(None, "", None, []) for _ in bundles]
        for row in rows:
            number, code = row[0], row[5]
            if code is not None:
                answers[number] = (code, row[6], row[7], [])
            elif answers[number][0] is None:
                answers[number][3].append(row)
        return answers

    def _hand_out(self, bundle: _Bundle, rows: list[Row]) -> None:
        topics = [unit.topic for unit in bundle.units for _ in unit.messages]
        placed: Placed = [_receipt(topic, *row[1:5]) for topic, row in zip(topics, rows, strict=True)]
        begin = 0
        for n, count in bundle.shares:
            self._answers[n] = placed[begin : begin + count]
            begin += count

    def _refuse(self, bundle: _Bundle, error: CustodyError) -> None:
        for n, _ in bundle.shares:
            self._answers[n] = error


def _any_delayed(caller: Publish) -> bool:
    return any(message.delayed for _, message in caller.messages)


def _receipt(
    topic: str, partition: int, number: int, duplicate: bool, deliver_at: datetime | None
) -> Receipt | Delayed:
    if deliver_at is None:
        return Receipt(topic, partition, number, duplicate)
    return Delayed(topic=topic, partition=partition, delay_id=number, deliver_at=deliver_at, duplicate=duplicate)


@dataclass(frozen=True, kw_only=True)
class Ack:
    """One caller's ack: these offsets of a lease, or all that it holds.

    With a topic and a partition the lease has to be of these. Without a lease it is one message, which has to be on its
    first one (`receipt_required`).
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
    try:
        one_lease = len(callers) == 1 or len({caller.lease_id or object() for caller in callers}) == 1
        rows = _ack(db, callers, wait=one_lease, now=now)
    except DatabaseUnavailable as error:
        return [error for _ in callers]
    except CustodyError as error:
        if len(callers) == 1:
            return [error]
        blocked = list(range(len(callers)))
        rows = []
    for number, settled, lost, code, message, remedy in rows:
        caller = callers[number - 1]
        if code == "blocked":
            blocked.append(number - 1)
        elif code is not None:
            answers[number - 1] = _ERRORS.get(code, CustodyError)(message, remedy or "")
        elif lost or not settled:
            what = listed(lost) if lost else "anything any more"
            answers[number - 1] = LeaseLost(f"lease {caller.lease_id} does not hold {what}", REMEDY, lost=lost or ())
        else:
            answers[number - 1] = Settled(settled=settled)
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


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One caller's claim: how many messages, for how long, for whom."""

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
    now: datetime | None,
) -> list[Lease]:
    """Leases for several callers, in their order, until there is nothing left: an empty one, with the reason, is the
    last. JSON payloads stay raw."""
    rows = db.call(
        "claim_each",
        topic=topic,
        group=group,
        partition=partition,
        max=[caller.max_messages for caller in callers],
        visibility=[
            None if caller.visibility_timeout is None else timedelta(seconds=seconds(caller.visibility_timeout))
            for caller in callers
        ],
        workers=[caller.worker for caller in callers],
        now=now,
    )
    return [
        lease_of(settler, topic, [row[1:] for row in some], decode_raw)
        for _, some in groupby(rows, key=lambda row: row[0])
    ]


def lease_place(db: Database, lease_id: UUID) -> tuple[str, str, int] | None:
    """The topic, group and partition of a lease, or None if it holds nothing any more."""
    rows = db.call("lease_place", lease_id=lease_id)
    return rows[0] if rows else None


def first_lease(db: Database, topic: str, group: str, partition: int, offset: int, *, now: datetime | None) -> UUID:
    """The lease of a message that is on its first one; else `receipt_required` or `lease_lost`."""
    found: UUID = db.call("first_lease", topic=topic, group=group, partition=partition, offset=offset, now=now)[0][0]
    return found


def in_flight(
    db: Database, topic: str, group: str | None, *, now: datetime | None
) -> dict[int, tuple[int, float | None]]:
    """For each partition how many messages are in flight, and since how many seconds the oldest lease."""
    rows: list[Any] = db.call("in_flight_figures", topic=topic, group=group, now=now)
    return {partition: (messages, age) for partition, messages, age in rows}
