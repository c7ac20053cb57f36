"""Random verbs on a real group and on its model, side by side."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.property.journal import Journal
from tests.property.model import Death, Filter, Model, Rules, Said
from tests.property.steps import KEY, rebinding, steps
from tests.property.tables import Connection, Reader
from tests.property.verbs import GROUP, Verbs

import custody
from custody.model.lifecycle import MessageState

if TYPE_CHECKING:
    from tests.conftest import Clock

_names = itertools.count()


class Lifecycle(Verbs, RuleBasedStateMachine):
    """Random steps; after each of them all that can be known is compared."""

    def __init__(
        self, c: custody.Custody, db: Connection, clock: Clock, rules: Rules, scale: int = 1, bound: str | None = None
    ) -> None:
        super().__init__()
        self.c, self.db, self.clock, self.terms, self.scale = c, db, clock, rules, scale
        self.topic = f"topic-{next(_names)}"
        self.bound = bound
        self.sound = False

    @initialize(keys=st.lists(KEY, min_size=10, max_size=40))
    def create(self, keys: list[str | None]) -> None:
        self.c.create_topic(self.topic)
        self.c.create_group(self.topic, GROUP, self.policy())
        self.model = Model(self.terms)
        self.journal = Journal()
        self.copies: list[Death] = []
        self.reader = Reader(self.db, self.topic, GROUP)
        self.tables = self.reader.read(self.clock())
        if self.bound is not None:
            self.bind(self.bound)
        self.publish(keys)

    @rule(step=steps)
    def do(self, step: tuple[str, dict[str, Any]]) -> None:
        self.sound = False
        verb, arguments = step
        getattr(self, verb)(**arguments)

    def teardown(self) -> None:
        if not self.sound:
            return  # a step has failed: what could be found now would only hide it
        self.drain()
        self.c.delete_topic(self.topic)

    # what has to hold after each step

    @invariant()
    def agrees(self) -> None:
        """Tables, journal and model say the same of every message."""
        self.sound = False
        now = self.clock()
        self.tables = self.reader.read(now)
        self.journal.extend(self.reader.journal(after=self.journal.last))
        assert all(0 <= offset < len(self.model.messages) for offset in self.tables.messages), "a message is invented"
        for message in self.model.messages:
            gone = message.offset < self.model.first and message.state is MessageState.DONE
            assert gone or message.offset in self.tables.messages, f"a message is missing: {message}"
        states = self.model.states(now)
        for offset, place in self.tables.messages.items():
            expected = self.model.messages[offset]
            seen = f"offset {offset} ({place.where})"
            assert place.state is states[offset], f"{seen}: {place.state}, {expected}"
            assert place.recorded is expected.state, f"{seen}: recorded as {place.recorded}, {expected}"
            assert place.held == expected.held, f"{seen}: held is {place.held}, {expected}"
            folded = self.journal.messages[offset]
            assert place.recorded is folded.state, f"{seen}: recorded as {place.recorded}, the journal: {folded}"
            if place.recorded is not MessageState.DONE:
                assert place.attempts == expected.attempts, f"{seen}: {place.attempts} attempts, {expected}"
                assert place.failures == expected.failures, f"{seen}: {place.failures} failures, {expected}"
                assert place.attempts == folded.attempts, f"{seen}: {place.attempts}, the journal {folded.attempts}"
        self._copied()
        if self.terms.ordered:
            shared = {key: leases for key, leases in self.tables.live_keys.items() if len(leases) > 1}
            assert not shared, f"two live leases hold the same key: {shared}"
            assert not self.tables.lost_wake_ups(), f"parked, and never looked at again: {self.tables.lost_wake_ups()}"
        self.sound = True

    def _copied(self) -> None:
        """Every death has left its copy, once, and the deaths of a key are in order."""
        new = self.reader.copies(after=len(self.copies))
        deaths = self.model.deaths[len(self.copies) :]
        assert sorted(new, key=repr) == sorted(deaths, key=repr), "the copies are not what has died"
        for key in {death.key for death in deaths} - {None}:
            of_key = [death for death in deaths if death.key == key]
            assert [death for death in new if death.key == key] == of_key or not self.terms.ordered, "out of order"
        self.model.deaths[len(self.copies) :] = new  # of what died at once, one order is as good as another
        self.copies += new

    # the end

    def drain(self) -> None:
        """Nothing is ever gone: once time has passed, everything can be claimed and done, but for what is dead."""
        self._figures()
        self.clock.move(1000)
        self._claim_all()
        if self.terms.max_parked is None:  # else so much may wait behind a held key that nothing more is read
            for message in self.model.messages:
                assert message.state in (MessageState.DONE, MessageState.DEAD) or self._behind_held(message.key), (
                    f"left over: {message}"
                )
        for key in {message.key for message in self.model.messages if message.key is not None}:
            self.release_key(key)
        self._claim_all()
        assert {message.state for message in self.model.messages} <= {MessageState.DONE, MessageState.DEAD}
        self.redrive(Filter(), dry_run=False)
        self._claim_all()
        assert {message.state for message in self.model.messages} <= {MessageState.DONE}
        self._figures()

    def _behind_held(self, key: str | None) -> bool:
        return any(message.held and message.key == key for message in self.model.messages)

    def _claim_all(self) -> None:
        while (lease_id := self._claim(60 * self.scale, 30)) is not None:
            self._settles_all(lease_id, Said("ack"), lambda: self.c.ack(lease_id))
        self.agrees()

    def _figures(self) -> None:
        """The figures count what is there."""
        now = self.clock()
        stats = self.c.stats(self.topic, GROUP)
        assert stats.in_flight == self.model.in_flight(now)
        assert stats.dead == len(self.model.dead(Filter()))
        assert stats.depth == sum(not message.resolved for message in self.model.messages)
        unresolved = [message.offset for message in self.model.messages if not message.resolved]
        assert stats.partitions[0].oldest_unresolved == min(unresolved, default=None)
        # the view goes by the server's clock, which is far behind the test's: to it every lease is live
        assert self.reader.deliveries() == sorted(
            (offset, place.recorded, place.attempts)
            for offset, place in self.tables.messages.items()
            if place.where not in ("resolved", "fresh")
        )


class Bound(Lifecycle):
    """The same of a group that is bound, and bound anew, to a part of the log."""

    @rule(step=rebinding)
    def rebind(self, step: tuple[str, dict[str, Any]]) -> None:
        self.do(step)
