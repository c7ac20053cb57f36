"""Publishes of many callers in one transaction."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import groupby
from typing import Any

from custody.coalesced.blocking import BLOCKED
from custody.errors import Busy, CustodyError, DatabaseUnavailable, InvalidArgument, by_code
from custody.model.codec import Encoded, encode_message
from custody.model.entities import Delayed, Outgoing, Receipt
from custody.model.placement import PLACED_WRONGLY, Layout, place
from custody.model.policy import seconds_or_none
from custody.store import packed
from custody.store.postgres import Database, Row
from custody.verbs import delays, log

_ERRORS = by_code()
_PLACED_WRONGLY = {error.code for error in PLACED_WRONGLY}
Placed = list[Receipt | Delayed]


@dataclass(frozen=True, kw_only=True)
class Publish:
    """One caller's publish: messages with their topics, all or none. `producer` is (id, epoch, sequence)."""

    messages: Sequence[tuple[str, Outgoing]]
    producer: tuple[str, int, int] | None = None
    expected_offset: int | None = None


@dataclass(frozen=True, kw_only=True)
class _Unit:
    """Messages for one call of `publish` or `publish_delayed`: all of one topic."""

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
    """Units that succeed or fail together: all units of one caller, or the joined single units of several callers.
    `shares` has (caller, number of messages)."""

    shares: list[tuple[int, int]]
    units: list[_Unit] = field(default_factory=list)


class Publishes:
    """Many publishes in one transaction. If one is refused, only its caller gets the error; the others are done."""

    def __init__(
        self,
        db: Database,
        callers: Sequence[Publish],
        *,
        layout_of: Callable[[str], Layout],
        forget: Callable[[str], object],
        patient: bool,
    ) -> None:
        self._db, self._callers, self._patient = db, callers, patient
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
                "expected_offset needs messages of one partition, without a delay", "Publish the others separately."
            )
        for (topic, delayed), run in groupby(caller.messages, key=lambda one: (one[0], one[1].delayed)):
            messages = [message for _, message in run]
            if delayed:
                for message in messages:
                    delays.require_time(message)
            encoded = [encode_message(message) for message in messages]
            layout, placed = self._place(topic, messages)
            yield _Unit(
                topic=topic,
                delayed=delayed,
                layout=layout,
                producer=(producer_id, epoch, sequence),
                expected=caller.expected_offset,
                placed=placed,
                encoded=encoded,
                messages=messages,
            )
            sequence = None if sequence is None else sequence + len(messages)

    def _place(self, topic: str, messages: Sequence[Outgoing]) -> tuple[Layout, list[int]]:
        layout = self._layout_of(topic)
        try:
            return layout, place(messages, layout)
        except PLACED_WRONGLY:
            self._forget(topic)
            layout = self._layout_of(topic)
            return layout, place(messages, layout)

    def _publish(self, bundles: list[_Bundle], *, wait: bool, again: bool = True) -> None:
        if not bundles:
            return
        if len(bundles) == 1 and len(bundles[0].units) == 1 and wait:
            self._publish_one(bundles[0], again=again)
            return
        try:
            answers = self._call(bundles, wait)
        except DatabaseUnavailable as error:  # the outcome is unknown, so it must not be tried again
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
        """Publishes one by one. Once the topic is busy for one, the rest get the same error: each would wait as
        long."""
        for number, n in enumerate(callers):
            self._publish(self._bundles([n], joined=False), wait=True)
            if isinstance(error := self._answers[n], Busy):
                self._answers.update(dict.fromkeys(callers[number + 1 :], error))
                return

    def _publish_one(self, bundle: _Bundle, *, again: bool) -> None:
        """Publishes a single unit by the plain function, which costs less. If it is refused, each caller is tried
        alone."""
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
            elif len(callers) == 1 or isinstance(error, Busy):  # they have already waited together
                self._refuse(bundle, error)
            else:
                self._publish(self._bundles(callers, joined=False), wait=True, again=again)
            return
        self._hand_out(bundle, rows)

    def _call_one(self, unit: _Unit) -> list[Row]:
        producer, epoch, sequence = unit.producer
        if producer is None and not unit.delayed:
            offsets = log.append(
                self._db, unit.topic, unit.encoded, unit.placed, layout=unit.layout, expected_offset=unit.expected
            )
            return [(0, partition, offset, False, None) for partition, offset in zip(unit.placed, offsets, strict=True)]
        given: dict[str, Any] = {
            "topic": unit.topic,
            "partitions": unit.placed,
            **packed.columns(unit.encoded),
            "producer": producer,
            "epoch": epoch,
            "sequence": sequence,
            "of": unit.layout.partitions,
        }
        if unit.delayed:
            given["deliver_at"] = [message.deliver_at for message in unit.messages]
            given["delays"] = [seconds_or_none(one.delay) for one in unit.messages]
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
            **packed.columns([encoded for _, unit in units for encoded in unit.encoded]),
            deliver_at=[message.deliver_at for message in messages],
            delays=[seconds_or_none(message.delay) for message in messages],
            wait=wait,
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
