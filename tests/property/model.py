"""A group on one partition as a small pure model. It does not predict what a claim returns: it judges it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from fnmatch import fnmatchcase
from typing import Literal
from uuid import UUID

from msgspec import Raw

from custody.model.entities import Message
from custody.model.lifecycle import MessageState
from custody.model.outcomes import OUTCOMES, Kind

REFUSALS: dict[str, str] = {"dead": "terminal", "reject": "rejected"}
"""Outcomes that make a message dead at once, with the reason that they give it."""
REPEATED: dict[Kind, frozenset[str]] = {
    kind: frozenset({one.entry, "dead"} if kind == "nack" else {one.entry}) for kind, one in OUTCOMES.items()
}
"""Of which a settle is a repeat, by what became of the message in the same lease."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What of a policy matters here; the backoff is constant."""

    ordered: bool
    hold: bool = False
    max_attempts: int = 3
    backoff: float = 5.0
    max_in_flight: int | None = None
    fairness: Literal["key", "tenant"] | None = None
    max_parked: int | None = None
    copies: bool = False
    """What dies leaves a copy in the dead-letter topic."""


@dataclass(frozen=True)
class Death:
    """What the copy of a dead message has to say."""

    offset: int
    key: str | None
    reason: str
    attempts: int


@dataclass
class Delivery:
    """One message in the group. `state` is the recorded one: processing until an expired lease is folded."""

    offset: int
    key: str | None
    published_at: datetime
    run_at: datetime
    routed: str | None = None
    """The routing key."""
    state: MessageState = MessageState.READY
    attempts: int = 0
    failures: int = 0
    held: bool = False
    most: int | None = None
    """The most messages that may be leased together with this one, after its lease expired."""
    last_error: str | None = None
    died_at: datetime | None = None

    @property
    def resolved(self) -> bool:
        return self.state is MessageState.DONE or (self.state is MessageState.DEAD and not self.held)


@dataclass
class Lease:
    size: int
    deadlines: dict[int, datetime]
    given: frozenset[int]
    done: dict[int, str] = field(default_factory=dict)
    """What its holder has settled, and what became of it."""

    def missing(self, now: datetime) -> tuple[int, ...]:
        """What was lost: given, not held any more, and not settled."""
        return tuple(sorted(self.given - self.live(now) - self.done.keys()))

    def again(self, said: Mapping[int, Said]) -> set[int]:
        return {offset for offset, what in said.items() if self.done.get(offset) in REPEATED[what.kind]}

    def live(self, now: datetime) -> set[int]:
        return {offset for offset, deadline in self.deadlines.items() if deadline > now}


@dataclass(frozen=True)
class Said:
    """What a worker says of one message."""

    kind: Kind
    error: str | None = None
    delay: float | None = None


@dataclass
class Verdict:
    """What a settle must answer: a refusal that changed nothing, or what it did and what the lease did not hold."""

    conflict: bool = False
    settled: int = 0
    lost: tuple[int, ...] = ()
    dead: tuple[int, ...] = ()
    released: tuple[int, ...] = ()
    already: bool = False


@dataclass(frozen=True, kw_only=True)
class Filter:
    """Which dead messages."""

    where_error: str | None = None
    key: str | None = None
    offsets: tuple[int, ...] | None = None
    died_until: datetime | None = None
    limit: int | None = None

    def picks(self, message: Delivery) -> bool:
        return (
            message.state is MessageState.DEAD
            and (self.where_error is None or _like(message.last_error, self.where_error))
            and (self.key is None or message.key == self.key)
            and (self.offsets is None or message.offset in self.offsets)
            and (self.died_until is None or (message.died_at is not None and message.died_at < self.died_until))
        )


def _like(text: str | None, pattern: str) -> bool:
    return text is not None and fnmatchcase(text, pattern.replace("%", "*"))


@dataclass
class Model:
    rules: Rules
    messages: list[Delivery] = field(default_factory=list)
    leases: dict[UUID, Lease] = field(default_factory=dict)
    deaths: list[Death] = field(default_factory=list)
    """Those that are to be copied, in the order in which they happened."""
    replayed: dict[int, tuple[int, bool]] = field(default_factory=dict)
    """By the offset of the copy: the offset that it got, and whether its message was still dead."""
    bound: frozenset[str | None] | None = None
    """The routing keys that the group gets; None: every message."""
    seen: set[int] = field(default_factory=set)
    """What a claim has looked at since it was published or rewound: a binding changes nothing for these."""
    first: int = 0
    """Where the log begins: retention has dropped what is before."""

    def publish(self, keys: Iterable[str | None], now: datetime, routed: Sequence[str | None] | None = None) -> range:
        """Appends the messages; returns the offsets that they must get."""
        first = len(self.messages)
        for offset, key in enumerate(keys, first):
            self.messages.append(Delivery(offset, key, now, now, routed[offset - first] if routed else None))
        return range(first, len(self.messages))

    def unwanted(self, message: Delivery) -> bool:
        """Whether the group is not bound to a message, and has not got it before it was bound so."""
        return self.bound is not None and message.routed not in self.bound and message.offset not in self.seen

    def passed(self, offsets: Iterable[int]) -> None:
        """Judges what a claim has passed over, then takes it over."""
        for offset in offsets:
            message = self.messages[offset]
            assert self.unwanted(message), f"offset {offset} was passed over, and is {message}"
            assert message.state is MessageState.READY, f"offset {offset} was passed over, and is {message.state}"
            message.state = MessageState.DONE

    def states(self, now: datetime) -> list[MessageState]:
        """As every reader must see them: expired at the deadline, folded or not."""
        flying = self._flying(now)
        return [
            MessageState.READY
            if message.state is MessageState.PROCESSING and message.offset not in flying
            else message.state
            for message in self.messages
        ]

    def live(self, now: datetime) -> list[UUID]:
        return [lease_id for lease_id, lease in self.leases.items() if lease.live(now)]

    def in_flight(self, now: datetime) -> int:
        return len(self._flying(now))

    # claims

    def fold(self, now: datetime) -> None:
        """Takes back what is expired. Only a message that was leased alone is charged for it."""
        for lease in self.leases.values():
            for offset in sorted(set(lease.deadlines) - lease.live(now)):
                del lease.deadlines[offset]
                message = self.messages[offset]
                message.state = MessageState.READY
                message.run_at = now
                message.most = max(1, lease.size // 10)
                if lease.size == 1:
                    self._charge(message, "lease expired", None, run_at=now, now=now, exhausted="lease_expired")

    def _charge(
        self,
        message: Delivery,
        error: str | None,
        reason: str | None,
        *,
        run_at: datetime,
        now: datetime,
        exhausted: str = "max_retries_exceeded",
    ) -> None:
        """One failure; with a reason, or at the last attempt, the message is dead."""
        message.failures += 1
        message.last_error = error
        message.run_at = run_at
        if reason is not None or message.failures >= self.rules.max_attempts:
            message.state = MessageState.DEAD
            if self.rules.copies:
                self.deaths.append(Death(message.offset, message.key, reason or exhausted, message.attempts))
            message.held = self.rules.hold and message.key is not None
            message.died_at = now
        else:
            message.state = MessageState.READY

    def _blockers(self, message: Delivery, flying: set[int]) -> set[int]:
        """Why the key of a message has to wait: its messages in flight, and its earlier unresolved ones."""
        if not self.rules.ordered or message.key is None:
            return set()
        return {
            other.offset
            for other in self.messages
            if other.key == message.key
            and (other.offset in flying or (other.offset < message.offset and not other.resolved))
            and not self.unwanted(other)
        }

    def _flying(self, now: datetime) -> set[int]:
        return {offset for lease in self.leases.values() for offset in lease.live(now)}

    def eligible(self, now: datetime) -> list[int]:
        """What a claim may hand out, each by itself: ready, due, and its key not blocked. Fold first."""
        flying = self._flying(now)
        return [
            message.offset
            for message in self.messages
            if message.state is MessageState.READY
            and message.run_at <= now
            and not self.unwanted(message)
            and not self._blockers(message, flying)
        ]

    def claim(
        self, lease_id: UUID, claimed: Sequence[Message], *, most: int, frontier: int, deadline: datetime, now: datetime
    ) -> None:
        """Judges what a claim handed out by every rule, then takes it over. `frontier` is where it stood before."""
        offsets = [message.offset for message in claimed]
        flying = self._flying(now)
        assert 0 < len(offsets) <= most, f"{len(offsets)} messages for a claim of {most}"
        assert offsets == sorted(set(offsets)), f"offsets out of order: {offsets}"
        for given in claimed:
            message = self.messages[given.offset]
            assert given.key == message.key, f"offset {given.offset} came with key {given.key!r}, not {message.key!r}"
            said = None if given.payload == Raw(b"null") else given.payload  # as a server passes it on
            assert said == message.key, f"offset {given.offset} of key {given.key!r} came with {given.payload!r}"
            assert given.published_at == message.published_at, f"offset {given.offset}: {given.published_at}"
            assert message.state is MessageState.READY, f"offset {given.offset} was handed out, and is {message.state}"
            assert message.run_at <= now, f"offset {given.offset} was handed out before it was due"
            assert given.routing_key == message.routed, f"offset {given.offset} came with {given.routing_key!r}"
            assert not self.unwanted(message), f"offset {given.offset} was handed out, and is not bound"
            assert given.attempt == message.attempts + 1, f"offset {given.offset}: attempt {given.attempt}"
            blockers = self._blockers(message, flying) - set(offsets)
            assert not blockers, f"offset {given.offset} of key {given.key!r} was handed out before {sorted(blockers)}"
            assert message.most is None or len(offsets) <= message.most, (
                f"offset {given.offset} is leased with {len(offsets)}, and after its expiry at most {message.most}"
            )
        if self.rules.max_in_flight is not None and offsets[-1] >= frontier:
            assert len(flying) + len(offsets) <= self.rules.max_in_flight, "fresh messages beyond max_in_flight"
        for offset in offsets:
            message = self.messages[offset]
            message.state = MessageState.PROCESSING
            message.attempts += 1
        self.leases[lease_id] = Lease(len(offsets), dict.fromkeys(offsets, deadline), frozenset(offsets))

    # settles

    def settle(self, lease_id: UUID, said: Mapping[int, Said], now: datetime) -> Verdict:
        lease = self.leases[lease_id]
        live = lease.live(now)
        todo = {offset: what for offset, what in said.items() if offset in live}
        again = lease.again(said)
        others = {offset for offset in again if said[offset].kind != "ack"}
        verdict = Verdict(
            settled=len(todo) + len(again), lost=tuple(sorted(set(said) - live - again)), already=bool(again)
        )
        leaving: list[int] = []
        # what left the lease with a key that stopped is told again
        told = {offset for offset, what in lease.done.items() if what == "release"} - said.keys() if others else set()
        if self.rules.ordered:
            for key in {self.messages[offset].key for offset in live} - {None}:
                of_key = sorted(offset for offset in live if self.messages[offset].key == key)
                follow = self._followers(of_key, todo)
                if follow is None:
                    return Verdict(conflict=True)
                leaving += follow
        dead = [offset for offset in others if lease.done[offset] == "dead"]
        for offset, what in sorted(todo.items()):
            self._apply(self.messages[offset], what, now)
            lease.done[offset] = what.kind
            if self.messages[offset].state is MessageState.DEAD:
                dead.append(offset)
                lease.done[offset] = "dead"
        for offset in leaving:
            self._apply(self.messages[offset], Said("release"), now)
            lease.done[offset] = "release"
        for offset in [*todo, *leaving]:
            del lease.deadlines[offset]
        verdict.dead = tuple(sorted(dead))
        verdict.released = tuple(sorted([*leaving, *told]))
        return verdict

    def settle_all(self, lease_id: UUID, what: Said, now: datetime) -> Verdict:
        """One outcome for all that was given and is not settled. Where nothing is left it may be a repeat."""
        lease = self.leases[lease_id]
        live = lease.live(now)
        lost = lease.missing(now)
        again = dict.fromkeys(sorted(lease.again(dict.fromkeys(lease.done, what))), what)
        verdict = self.settle(lease_id, dict.fromkeys(live, what) or again, now)
        verdict.lost = lost
        if not live:
            verdict.released = ()
        return verdict

    def _followers(self, of_key: list[int], todo: Mapping[int, Said]) -> list[int] | None:
        """What leaves the lease behind a message of its key that did not go well; None where the order is broken."""
        leaving = []
        barred = stopped = False
        for offset in of_key:
            what = todo.get(offset)
            if what is not None and (
                OUTCOMES[what.kind].resolves == "yes" or (what.kind in REFUSALS and not self.rules.hold)
            ):
                if barred:
                    return None
            else:
                barred = True
                if what is not None:
                    stopped = True
                elif stopped:
                    leaving.append(offset)
        return leaving

    def _apply(self, message: Delivery, what: Said, now: datetime) -> None:
        message.most = None
        delay = timedelta(seconds=self.rules.backoff if what.delay is None else what.delay)
        if OUTCOMES[what.kind].resolves == "yes":
            message.state = MessageState.DONE
        elif what.kind == "nack" or what.kind in REFUSALS:
            self._charge(message, what.error, REFUSALS.get(what.kind), run_at=now + delay, now=now)
        else:
            message.state = MessageState.READY
            message.attempts -= 1
            message.run_at = now + delay if what.kind == "later" else now

    def extend(self, lease_id: UUID, deadline: datetime, offset: int | None, now: datetime) -> bool:
        """One message takes its key with it where that is ordered. False: the lease does not hold it any more."""
        lease = self.leases[lease_id]
        live = lease.live(now)
        if offset is not None:
            key = self.messages[offset].key if offset in live and self.rules.ordered else None
            live = {o for o in live if o == offset or (key is not None and self.messages[o].key == key)}
        lease.deadlines.update(dict.fromkeys(live, deadline))
        return bool(live)

    # operators

    def dead(self, which: Filter) -> list[int]:
        return [message.offset for message in self.messages if which.picks(message)][: which.limit]

    def redrive(self, which: Filter, now: datetime) -> list[int]:
        picked = self.dead(which)
        for offset in picked:
            self._renew(self.messages[offset], now)
        return picked

    def _renew(self, message: Delivery, now: datetime) -> None:
        message.state = MessageState.READY
        message.attempts = message.failures = 0
        message.held = False
        message.most = None
        message.run_at = now

    def discard(self, which: Filter) -> list[int]:
        picked = self.dead(which)
        for offset in picked:
            self.skip(offset)
        return picked

    def skip(self, offset: int) -> None:
        self.messages[offset].state = MessageState.DONE
        self.messages[offset].held = False

    def rewind(self, target: int, now: datetime) -> None:
        for message in self.messages[target:]:
            self._renew(message, now)
            for lease in self.leases.values():
                lease.deadlines.pop(message.offset, None)

    def offset_at(self, time: datetime) -> int:
        return next((m.offset for m in self.messages[self.first :] if m.published_at >= time), len(self.messages))

    def retain(self, first: int) -> int:
        """The log begins there now. What was unresolved is done by it, but for dead letters; returns how many."""
        lost = [m for m in self.messages[self.first : first] if m.state not in (MessageState.DONE, MessageState.DEAD)]
        for message in lost:
            assert message.state is MessageState.READY, f"retention took what is in flight: {message}"
            message.state = MessageState.DONE
        self.first = first
        return len(lost)

    def replay(self, copy: int, now: datetime) -> tuple[int, bool, bool]:
        """What a replay of that copy must answer: the offset, whether it is a repeat, and whether it was still dead."""
        if copy in self.replayed:
            offset, resolved = self.replayed[copy]
            return offset, True, resolved
        message = self.messages[self.deaths[copy].offset]
        resolved = message.state is MessageState.DEAD
        if resolved:
            self.skip(message.offset)
        (offset,) = self.publish([message.key], now, [message.routed])
        self.replayed[copy] = offset, resolved
        return offset, False, resolved

    def release_key(self, key: str) -> int:
        held = [message for message in self.messages if message.key == key and message.held]
        for message in held:
            message.held = False
        return len(held)
