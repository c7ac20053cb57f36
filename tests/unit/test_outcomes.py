"""The table of outcomes agrees with the types, the journal, the counts, and the SQL that makes them."""

from __future__ import annotations

import re
from dataclasses import fields
from importlib import resources
from typing import get_args

import pytest

from custody.model.lifecycle import JOURNAL, MessageState
from custody.model.outcomes import OUTCOMES, Counts, Dead, Decision, Kind, Later, Outcome, Retry, Skip, outcome_of
from custody.testing import Drained
from custody.verbs.pipelines import Committed
from custody.worker import WorkerSummary

pytestmark = pytest.mark.req("V3")


def test_there_is_a_line_for_every_outcome() -> None:
    assert tuple(OUTCOMES) == get_args(Kind)


@pytest.mark.parametrize("kind", OUTCOMES)
def test_an_outcome_leaves_the_entry_of_its_move_and_is_counted(kind: Kind) -> None:
    found = OUTCOMES[kind]
    entry = JOURNAL[found.entry]
    assert MessageState.PROCESSING in entry.sources
    assert (found.resolves != "no") == (entry.target in (MessageState.DONE, MessageState.DEAD))
    assert (found.resolves == "unless held") == (entry.target is MessageState.DEAD)
    assert found.counted in {one.name for one in fields(Counts)}


def test_sql_has_the_same_outcomes_and_they_stop_the_same_keys() -> None:
    settle = resources.files("custody.store").joinpath("sql/lifecycle/settle.sql").read_text(encoding="utf-8")
    found = re.search(r"FUNCTION custody\.stops_key.*?\$\$(.*?)\$\$", settle, re.DOTALL)
    assert found is not None
    stops = {
        kind: then
        for listed, then in re.findall(r"WHEN p_outcome (?:IN|=) (.*?) THEN (.+?)(?: END)?\n", found[1])
        for kind in re.findall(r"'(\w+)'", listed)
    }
    assert stops == {
        kind: {"no": "true", "yes": "false", "unless held": "p_on_dead = 'hold'"}[one.resolves]
        for kind, one in OUTCOMES.items()
    }


@pytest.mark.parametrize("summary", [WorkerSummary, Committed, Drained])
def test_summaries_have_every_count(summary: type[Counts]) -> None:
    assert issubclass(summary, Counts)


def test_counts_are_said_on_one_line() -> None:
    counts = Counts(done=1200, failed=3, dead=1, later=2)
    assert counts.in_words() == "1,200 done, 3 failed, 1 dead, 2 postponed, 0 skipped, 0 released, 0 lost"
    assert counts.in_words(dead="of them dead").startswith("1,200 done, 3 failed, 1 of them dead, ")


@pytest.mark.parametrize(
    ("raised", "outcome"),
    [
        (None, Outcome("ack")),
        (ValueError("wrong"), Outcome("nack", error="ValueError: wrong")),
        (Retry("busy", after="5s"), Outcome("nack", error="busy", delay="5s")),
        (Dead("never"), Outcome("dead", error="never")),
        (Later("1h"), Outcome("later", delay="1h")),
        (Skip("cancelled"), Outcome("skip", error="cancelled")),
        (Skip(), Outcome("skip")),
    ],
)
def test_what_a_handler_raises_is_an_outcome(raised: BaseException | None, outcome: Outcome) -> None:
    assert outcome_of(raised) == outcome


def test_every_decision_has_an_outcome() -> None:
    made = {Retry(), Dead("x"), Later("1s"), Skip()}
    assert {type(one) for one in made} == set(Decision.__subclasses__())
    assert {one.outcome().kind for one in made} <= set(OUTCOMES)
