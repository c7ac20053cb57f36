"""Random verbs against the model, in every mode of a group. CUSTODY_PROPERTY_EXAMPLES and _STEPS set how long."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from tests.extent import EXAMPLES
from tests.property.machine import Bound, Lifecycle
from tests.property.model import Rules
from tests.property.tables import Connection

import custody

if TYPE_CHECKING:
    from tests.conftest import Clock

STEPS = int(os.environ.get("CUSTODY_PROPERTY_STEPS", "40"))
PHASES = [phase for phase in Phase if phase is not Phase.explain]

MODES = {
    "unordered": Rules(ordered=False),
    "ordered, dead releases": Rules(ordered=True, max_attempts=2),
    "ordered, dead holds": Rules(ordered=True, hold=True, max_attempts=2),
    "ordered, capped": Rules(ordered=True, max_in_flight=8),
    "unordered, copied": Rules(ordered=False, max_attempts=2, copies=True),
    "ordered, held and copied": Rules(ordered=True, hold=True, max_attempts=2, copies=True),
    "fair by key": Rules(ordered=True, fairness="key", max_attempts=2),
    "fair by tenant, dead holds": Rules(ordered=True, fairness="tenant", hold=True, max_attempts=2),
    "fair, capped": Rules(ordered=True, fairness="key", max_in_flight=8),
    "fair, little parked": Rules(ordered=True, fairness="tenant", max_parked=5),
}
BINDABLE = [mode for mode, rules in MODES.items() if rules.fairness is None]


def run(
    c: custody.Custody,
    db: Connection,
    clock: Clock,
    rules: Rules,
    *,
    examples: int,
    steps: int,
    scale: int = 1,
    bound: str | None = None,
) -> None:
    start = clock()

    def machine() -> Lifecycle:
        clock.time = start
        return (Lifecycle if bound is None else Bound)(c, db, clock, rules, scale, bound)

    run_state_machine_as_test(
        machine,  # type: ignore[arg-type]  # whatever makes one will do
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
            phases=PHASES,
        ),
    )


@pytest.mark.core
@pytest.mark.req("K2", "K4", "C2", "C3", "G14", "N2")
@pytest.mark.parametrize("mode", MODES)
def test_random_verbs(c: custody.Custody, db: Connection, clock: Clock, mode: str) -> None:
    """Tables, journal and model agree after every verb; no rule of the order is broken; nothing is ever gone."""
    run(c, db, clock, MODES[mode], examples=EXAMPLES, steps=STEPS)


@pytest.mark.core
@pytest.mark.req("V11", "K2", "N2")
@pytest.mark.parametrize("mode", BINDABLE)
def test_random_verbs_of_a_bound_group(c: custody.Custody, db: Connection, clock: Clock, mode: str) -> None:
    """The same while bindings change and what was passed over comes back by rewinds."""
    run(c, db, clock, MODES[mode], examples=EXAMPLES, steps=STEPS, bound="star")


@pytest.mark.req("C1", "C4")
@pytest.mark.parametrize("ordering", ["none", "key"])
def test_random_verbs_on_large_leases(c: custody.Custody, db: Connection, clock: Clock, ordering: str) -> None:
    """The same with leases of hundreds, which are split when they are settled piecemeal and shrink when they expire."""
    run(c, db, clock, Rules(ordered=ordering == "key"), examples=max(2, EXAMPLES // 2), steps=STEPS // 2, scale=20)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.req("K2")
@pytest.mark.parametrize("mode", MODES)
def test_random_verbs_at_length(c: custody.Custody, db: Connection, clock: Clock, mode: str) -> None:
    """The same for many more and longer runs."""
    run(c, db, clock, MODES[mode], examples=EXAMPLES * 200, steps=STEPS * 2)
    if mode in BINDABLE:
        run(c, db, clock, MODES[mode], examples=EXAMPLES * 100, steps=STEPS * 2, bound="star")
