"""Every verb, done on a real group and on its model, and the answers compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Literal, cast
from uuid import UUID

import pytest
from tests.property.journal import Journal
from tests.property.model import Filter, Model, Rules, Said, Verdict
from tests.property.tables import Connection, Reader, Tables

import custody
from custody.coalesced import Claim
from custody.engine.server_verbs import ServerVerbs
from custody.errors import InvalidArgument, LeaseLost, NotSkippable, OffsetOutOfRange, OrderConflict
from custody.model.entities import Settled
from custody.model.lifecycle import MessageState
from custody.model.outcomes import Kind

if TYPE_CHECKING:
    from tests.conftest import Clock

GROUP = "group"
SEPARATOR = "-"
"""In keys, after the name of the tenant."""
ROUTED = ("orders.eu.created", "orders.us.created", None, "orders.eu.paid", "stock")
BINDINGS: dict[str | None, tuple[list[custody.Binding | str], frozenset[str | None] | None]] = {
    None: ([], None),
    "one": (["stock"], frozenset({"stock"})),
    "star": (["orders.*.created"], frozenset({"orders.eu.created", "orders.us.created"})),
    "rest": (["orders.>", "stock"], frozenset(ROUTED) - {None}),
    "header": (
        [custody.Binding("orders.>", headers={"x-custody-routing-key": "orders.eu.paid"})],
        frozenset({"orders.eu.paid"}),
    ),
    "none": (["nothing.*"], frozenset()),
}
EXCLUSIVE = 10_000
"""Beyond so many messages in flight an ordered partition is busy for others."""


class Verbs:
    """One group on one partition, in a topic of its own. `scale` multiplies what is published and claimed in bulk."""

    c: custody.Custody
    db: Connection
    clock: Clock
    terms: Rules
    scale: int
    topic: str
    model: Model
    reader: Reader
    journal: Journal
    tables: Tables
    """As they were after the step before."""

    def policy(self) -> custody.Policy:
        return custody.Policy(
            ordering="key" if self.terms.ordered else "none",
            on_dead="hold" if self.terms.hold else "release",
            max_attempts=self.terms.max_attempts,
            backoff=custody.Constant(self.terms.backoff),
            max_in_flight=self.terms.max_in_flight,
            dead_letter="topic" if self.terms.copies else "keep",
            fairness=self.terms.fairness,
            tenant_separator=SEPARATOR,
            max_parked=self.terms.max_parked,
        )

    # the log, and time

    def publish(self, keys: list[str | None]) -> None:
        if self.scale > 1:  # many keys, too
            keys = [key and f"{key}{n % 10}" for n in range(self.scale) for key in keys]
        # routing keys in turn, so that those of a message's own key differ
        routed = [ROUTED[(len(self.model.messages) + n) % len(ROUTED)] for n in range(len(keys))]
        messages = [custody.Outgoing(key, key=key, routing_key=to) for key, to in zip(keys, routed, strict=True)]
        receipts = self.c.publish_many(self.topic, messages)
        assert [receipt.offset for receipt in receipts] == list(self.model.publish(keys, self.clock(), routed))

    def advance(self, seconds: int) -> None:
        self.clock.move(seconds)

    # claims

    def claim(self, most: int, visibility: int) -> None:
        if len(self.model.live(self.clock())) < 9:
            self._claim(most, visibility)

    def claim_many(self, most: int, visibility: int) -> None:
        self.claim(most * self.scale, visibility)

    def _claim(self, most: int, visibility: int) -> UUID | None:
        """A claim hands out only what it may, and is empty only if nothing may be handed out."""
        for _ in range(5):
            frontier = self.reader.frontier()
            self._look(frontier)
            lease = self.c.claim(self.topic, GROUP, max_messages=most, visibility_timeout=visibility)
            now = self.clock()
            self.model.fold(now)
            for entry in self.reader.journal(after=self.journal.last):
                if entry.kind == "pass":
                    self.model.passed(offset for offset in entry.offsets() if offset not in self.model.seen)
                    self.model.seen.update(entry.offsets())
            if lease:
                deadline = now + timedelta(seconds=visibility)
                assert lease.deadline == deadline
                self.model.claim(
                    lease.lease_id, lease.messages, most=most, frontier=frontier, deadline=deadline, now=now
                )
                return lease.lease_id
            if lease.reason != "busy":
                break
        else:
            assert self.terms.ordered, "busy five times in a row, and nobody else is there"
            assert self.model.in_flight(now) > EXCLUSIVE, "busy five times in a row, and nobody else is there"
            return None
        eligible = self.model.eligible(now)
        if lease.reason == "max_in_flight":
            assert self.terms.max_in_flight is not None
            assert self.model.in_flight(now) >= self.terms.max_in_flight
            eligible = [offset for offset in eligible if offset < frontier]
            if self.terms.fairness is not None:  # what it has parked is as good as fresh to a cap
                places = self.reader.read(now).messages
                eligible = [offset for offset in eligible if places[offset].where != "parked"]
        elif lease.reason == "max_parked":
            assert self.terms.max_parked is not None
            eligible = [offset for offset in eligible if offset < frontier]
        else:
            assert lease.reason == "empty"
        assert not eligible, f"the claim was {lease.reason}, but {eligible} could be handed out"
        return None

    def claim_each(self, most: list[int], visibility: int) -> None:
        """As a server claims for several callers: each lease is judged as if it came after the one before."""
        if len(self.model.live(self.clock())) > 6:
            return
        frontier = self.reader.frontier()
        self._look(frontier)
        callers = [Claim(max_messages=n, visibility_timeout=visibility + number) for number, n in enumerate(most)]
        leases = ServerVerbs(self.c).claim_each(self.topic, GROUP, None, callers)
        now = self.clock()
        self.model.fold(now)
        for entry in self.reader.journal(after=self.journal.last):
            if entry.kind == "pass":
                self.model.passed(offset for offset in entry.offsets() if offset not in self.model.seen)
                self.model.seen.update(entry.offsets())
        for lease, caller in zip(leases, callers, strict=False):
            if not lease:
                assert lease is leases[-1]
                break
            deadline = now + timedelta(seconds=float(caller.visibility_timeout or 0))
            assert lease.deadline == deadline
            self.model.claim(
                lease.lease_id,
                lease.messages,
                most=caller.max_messages,
                frontier=frontier,
                deadline=deadline,
                now=now,
            )

    def _look(self, frontier: int) -> None:
        """What a binding still decides about: what is fresh, and what was rewound."""
        unseen = self.reader.rewound() | set(range(frontier, len(self.model.messages)))
        self.model.seen = set(range(len(self.model.messages))) - unseen

    def bind(self, name: str | None) -> None:
        """New bindings hold for what comes, and for what is rewound; what was looked at stays as it is."""
        if self.terms.fairness is not None and name is not None:
            with pytest.raises(InvalidArgument, match="bound and fair"):
                self.c.bind(self.topic, GROUP, BINDINGS[name][0])
            return
        bindings, self.model.bound = BINDINGS[name]
        assert len(self.c.bind(self.topic, GROUP, bindings).bindings) == len(bindings)

    # settles

    def _lease(self, pick: int) -> UUID | None:
        """One of the live leases; a claim in place of what needs one, if there is none."""
        live = self.model.live(self.clock())
        return live[pick % len(live)] if live else self._claim(3, 30)

    def _some(self, lease_id: UUID, mask: int) -> list[int]:
        live = sorted(self.model.leases[lease_id].live(self.clock()))
        return [offset for n, offset in enumerate(live) if mask >> (n % 12) & 1] or live[:1]

    def _settles(self, lease_id: UUID, said: dict[int, Said], call: Callable[[], Settled]) -> None:
        self._judge(self.model.settle(lease_id, said, self.clock()), call)

    def _settles_all(self, lease_id: UUID, what: Said, call: Callable[[], Settled]) -> None:
        self._judge(self.model.settle_all(lease_id, what, self.clock()), call)

    def _judge(self, verdict: Verdict, call: Callable[[], Settled]) -> None:
        try:
            settled = call()
        except OrderConflict:
            assert verdict.conflict, "the order was not broken"
        except LeaseLost as error:
            assert not verdict.conflict, "the order was broken"
            assert error.lost == verdict.lost  # noqa: PT017  # one of three outcomes
            assert verdict.lost or not verdict.settled, "nothing was lost"
        else:
            assert not verdict.conflict, "the order was broken"
            assert not verdict.lost, f"not held, and yet settled: {verdict.lost}"
            assert settled.settled == verdict.settled
            assert tuple(sorted(settled.dead)) == verdict.dead
            assert tuple(sorted(settled.released)) == verdict.released
            assert settled.already == verdict.already

    def ack_all(self, pick: int) -> None:
        if (lease_id := self._lease(pick)) is None:
            return
        self._settles_all(lease_id, Said("ack"), lambda: self.c.ack(lease_id))

    def settle_all(self, pick: int, kind: Kind) -> None:
        if (lease_id := self._lease(pick)) is not None:
            self._settle_all(lease_id, kind)

    def _settle_all(self, lease_id: UUID, kind: Kind) -> None:
        self._settles_all(lease_id, Said(kind), lambda: self.c.settle(lease_id, custody.Outcome(kind)))

    def settle_again(self, pick: int, mask: int) -> None:
        """What a lease has settled, and perhaps some that it has not, with the same outcomes once more."""
        settled = [lease_id for lease_id, lease in self.model.leases.items() if lease.done]
        if not settled:
            return
        lease_id = settled[-1 - pick % len(settled)]
        lease = self.model.leases[lease_id]
        offsets = [offset for n, offset in enumerate(sorted(lease.given)) if mask >> (n % 12) & 1]
        if offsets:
            self._settle_each(lease_id, {o: Said(cast("Kind", lease.done.get(o, "ack")), "again") for o in offsets})

    def ack_some(self, pick: int, mask: int) -> None:
        if (lease_id := self._lease(pick)) is None:
            return
        offsets = self._some(lease_id, mask)
        self._settles(lease_id, dict.fromkeys(offsets, Said("ack")), lambda: self.c.ack(lease_id, offsets))

    def nack_some(self, pick: int, mask: int, error: str | None, delay: float | None, requeue: bool) -> None:
        if (lease_id := self._lease(pick)) is None:
            return
        offsets = self._some(lease_id, mask)
        said = Said("nack" if requeue else "reject", error, delay)
        self._settles(
            lease_id,
            dict.fromkeys(offsets, said),
            lambda: self.c.nack(lease_id, offsets, error=error, delay=delay, requeue=requeue),
        )

    def nack_all(self, pick: int, error: str | None) -> None:
        if (lease_id := self._lease(pick)) is None:
            return
        self._settles_all(lease_id, Said("nack", error), lambda: self.c.nack(lease_id, error=error))

    def release_some(self, pick: int, mask: int) -> None:
        if (lease_id := self._lease(pick)) is None:
            return
        offsets = self._some(lease_id, mask)
        self._settles(lease_id, dict.fromkeys(offsets, Said("release")), lambda: self.c.release(lease_id, offsets))

    def later_some(self, pick: int, mask: int, after: float) -> None:
        if (lease_id := self._lease(pick)) is None:
            return
        offsets = self._some(lease_id, mask)
        said = dict.fromkeys(offsets, Said("later", delay=after))
        self._settles(lease_id, said, lambda: self.c.later(lease_id, offsets, after=after))

    def settle_mixed(self, pick: int, mask: int, kinds: list[Kind], delay: float | None) -> None:
        if (lease_id := self._lease(pick)) is None:
            return
        offsets = self._some(lease_id, mask)
        said = {offset: Said(kinds[n % len(kinds)], "mixed", delay) for n, offset in enumerate(offsets)}
        self._settle_each(lease_id, said)

    def _settle_each(self, lease_id: UUID, said: dict[int, Said]) -> None:
        outcomes = {
            offset: custody.Outcome(what.kind, error=what.error, delay=what.delay) for offset, what in said.items()
        }
        self._settles(lease_id, said, lambda: self.c.settle(lease_id, outcomes))

    def settle_strange(self, pick: int, offsets: list[int], kind: Kind) -> None:
        """Whatever the lease does not hold is lost and stays as it is, be it another's, settled or not there."""
        if self.model.leases:
            lease_id = list(self.model.leases)[-1 - pick % len(self.model.leases)]
            self._settle_each(lease_id, dict.fromkeys(offsets, Said(kind, "strange")))

    def settle_late(self, pick: int, how: str) -> None:
        """A lease that is settled, expired or revoked changes nothing any more: it can only repeat itself."""
        now = self.clock()
        gone = [lease_id for lease_id, lease in self.model.leases.items() if not lease.live(now)]
        if not gone:
            return
        lease_id = gone[-1 - pick % len(gone)]
        if how == "extend":
            with pytest.raises(LeaseLost) as lost:
                self.c.extend(lease_id, 60)
            assert lost.value.lost == self.model.leases[lease_id].missing(now)
        elif how.startswith("all "):
            self._settle_all(lease_id, cast("Kind", how.removeprefix("all ")))
        else:
            said = dict.fromkeys(sorted(self.model.leases[lease_id].given), Said(cast("Kind", how)))
            self._settle_each(lease_id, said)

    def extend(self, pick: int, one: int | None, timeout: int) -> None:
        if (lease_id := self._lease(pick)) is None:
            return
        if one is not None:
            held = sorted(self.model.leases[lease_id].deadlines)
            one = held[one % len(held)] if one < 55 else one
        deadline = self.clock() + timedelta(seconds=timeout)
        lost = self.model.leases[lease_id].missing(self.clock()) if one is None else (one,)
        if self.model.extend(lease_id, deadline, one, self.clock()) and (one is not None or not lost):
            assert self.c.extend(lease_id, timeout, offset=one) == deadline
        else:
            with pytest.raises(LeaseLost) as refused:
                self.c.extend(lease_id, timeout, offset=one)
            assert refused.value.lost == lost

    # operators

    def redrive(self, which: Filter, dry_run: bool) -> None:
        expected = self.model.dead(which)
        assert self._on_dead(self.c.redrive, which, dry_run) == expected
        if not dry_run:
            self.model.redrive(which, self.clock())

    def discard(self, which: Filter) -> None:
        assert self._on_dead(self.c.discard, which, False) == self.model.discard(which)

    def _on_dead(self, verb: Callable[..., list[tuple[int, int]]], which: Filter, dry_run: bool) -> list[int]:
        found = verb(
            self.topic,
            GROUP,
            dry_run=dry_run,
            where_error=which.where_error,
            key=which.key,
            partition=0,
            offsets=which.offsets,
            limit=which.limit,
        )
        return [offset for _, offset in found]

    def rewind(self, back: int) -> None:
        """To so many messages before the frontier; there is no rewinding forward, nor before the first offset."""
        frontier = self.tables.frontier
        target = frontier - back
        if self.model.first <= target <= frontier:
            rewound = self.c.rewind(self.topic, GROUP, to_offset=target, partition=0)
            assert [(r.target, r.messages) for r in rewound] == [(target, back)]
            self.model.rewind(target, self.clock())
        else:
            with pytest.raises(OffsetOutOfRange):
                self.c.rewind(self.topic, GROUP, to_offset=target, partition=0)

    def rewind_to_time(self, seconds: int) -> None:
        time = self.clock() - timedelta(seconds=seconds)
        target = min(self.model.offset_at(time), self.tables.frontier)
        rewound = self.c.rewind(self.topic, GROUP, to_time=time)
        assert [(r.target, r.messages) for r in rewound] == [(target, self.tables.frontier - target)]
        self.model.rewind(target, self.clock())

    def skip(self, pick: int) -> None:
        if not self.model.messages:
            return
        offset = pick % len(self.model.messages)
        state = self.model.states(self.clock())[offset]
        if state in (MessageState.DONE, MessageState.PROCESSING) or offset >= self.tables.frontier:
            with pytest.raises(NotSkippable):
                self.c.skip(self.topic, GROUP, 0, offset)
        else:
            self.c.skip(self.topic, GROUP, 0, offset)
            self.model.fold(self.clock())
            self.model.skip(offset)

    def release_key(self, key: str) -> None:
        assert self.c.release_key(self.topic, GROUP, key) == self.model.release_key(key)

    def replay(self, pick: int) -> None:
        """One of the copies, perhaps not for the first time, is published as the message that it was."""
        if not self.model.deaths:
            return
        copy = pick % len(self.model.deaths)
        replayed = self.c.replay(f"{self.topic}-dlq", 0, copy)
        assert (replayed.offset, replayed.duplicate, replayed.resolved) == self.model.replay(copy, self.clock())

    def update(self, max_attempts: int, hold: bool, copies: bool, fair: Literal["key", "tenant"] | None = None) -> None:
        """A new policy holds for what happens from now on: what is held stays held, what is dead stays dead."""
        self.terms = replace(self.terms, max_attempts=max_attempts, hold=hold and self.terms.ordered, copies=copies)
        if self.terms.fairness is not None:
            self.terms = replace(self.terms, fairness=fair)
        self.c.update_group(self.topic, GROUP, self.policy())
        self.model.rules = self.terms

    # retention

    def seal(self) -> None:
        self.db.execute("SELECT custody.seal_segment(%s, %s)", [self.topic, self.clock()])

    def retain(self, unresolved: bool, seal: bool) -> None:
        """All that is sealed goes, up to what is not resolved; if the topic says so, up to what is in flight."""
        if seal:
            self.seal()
        rules = custody.Retention(time="500ms", segment_time="1000h", drop_unresolved=unresolved)
        self.c.set_retention(self.topic, rules)
        self.clock.move(1)
        steps = self.c.maintain(self.topic)
        self.c.set_retention(self.topic, None)
        if unresolved and steps:
            self.model.fold(self.clock())
        (first,) = self.c.topic(self.topic).first_offsets
        open_before = [m.offset for m in self.model.messages[self.model.first :] if not m.resolved]
        assert sum(step.messages or 0 for step in steps if step.did == "dropped") == first - self.model.first
        lost = self.model.retain(first)
        assert sum(step.lost or 0 for step in steps) == lost
        assert unresolved or not lost, f"{lost} unresolved messages are gone"
        held = [step.held_offset for step in steps if step.did == "held"]
        if held and unresolved:
            assert self.model.messages[held[0] or 0].state is MessageState.PROCESSING
        elif held:
            assert held == open_before[:1], "another one is the first that is not resolved"

    def pause(self) -> None:
        """A paused group hands out nothing."""
        assert not self.c.resume(self.topic, GROUP)
        assert self.c.pause(self.topic, GROUP, reason="rest")
        assert not self.c.pause(self.topic, GROUP)
        lease = self.c.claim(self.topic, GROUP)
        assert (bool(lease), lease.reason, lease.detail) == (False, "paused", "rest")
        assert self.c.resume(self.topic, GROUP)
