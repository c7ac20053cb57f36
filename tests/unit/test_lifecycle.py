"""Every pair of states, for every actor; and the journal's kinds, which may only make legal moves."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

import pytest

from custody.model.lifecycle import JOURNAL, Actor, MessageState

READY, PROCESSING, DONE, DEAD = MessageState.READY, MessageState.PROCESSING, MessageState.DONE, MessageState.DEAD

BY_WORKER = {(READY, PROCESSING), (PROCESSING, DONE), (PROCESSING, READY), (PROCESSING, DEAD)}
BY_OPERATOR = {(DONE, READY), (DEAD, READY), (DEAD, DONE), (READY, DONE), (PROCESSING, READY)}
EVERY_PAIR = [(source, target) for source in MessageState for target in MessageState]


@pytest.mark.req("V1")
def test_there_are_four_states() -> None:
    assert [state.value for state in MessageState] == ["ready", "processing", "done", "dead"]


@pytest.mark.req("V1")
@pytest.mark.parametrize(("source", "target"), EVERY_PAIR)
def test_a_worker_makes_only_its_four_moves(source: MessageState, target: MessageState) -> None:
    assert source.can_become(target) is ((source, target) in BY_WORKER)
    assert source.can_become(target, Actor.WORKER) is ((source, target) in BY_WORKER)


@pytest.mark.req("V8", "V9", "K8")
@pytest.mark.parametrize(("source", "target"), EVERY_PAIR)
def test_an_operator_makes_those_and_five_more(source: MessageState, target: MessageState) -> None:
    assert source.can_become(target, Actor.OPERATOR) is ((source, target) in BY_WORKER | BY_OPERATOR)


@pytest.mark.req("V11")
@pytest.mark.parametrize(("source", "target"), EVERY_PAIR)
def test_what_is_not_bound_is_passed_over_and_nothing_else(source: MessageState, target: MessageState) -> None:
    assert source.can_become(target, Actor.BINDING) is ((source, target) == (READY, DONE))


@pytest.mark.parametrize("state", MessageState)
def test_no_state_becomes_itself(state: MessageState) -> None:
    assert not any(state.can_become(state, actor) for actor in Actor)


@pytest.mark.req("V3")
@pytest.mark.parametrize("kind", sorted(JOURNAL))
def test_a_kind_of_journal_entry_has_a_move_or_none(kind: str) -> None:
    found = JOURNAL[kind]
    assert (found.target is None) == (not found.sources)
    assert found.target not in found.sources
    assert found.words


@pytest.mark.req("V3", "C3")
def test_only_a_delivery_counts_and_only_release_and_later_take_it_back() -> None:
    changes = {name: kind.attempts for name, kind in JOURNAL.items() if kind.attempts is not None}
    assert changes == {"claim": +1, "release": -1, "later": -1, "redrive": 0, "rewind": 0}


@pytest.mark.req("V3")
def test_the_table_knows_every_kind_that_the_journal_may_hold() -> None:
    journal = resources.files("custody.store").joinpath("sql/schema/journal.sql").read_text(encoding="utf-8")
    check = re.search(r"CHECK \(kind IN \((.*?)\)\)", journal, re.DOTALL)
    assert check is not None
    assert set(JOURNAL) == set(re.findall(r"'(\w+)'", check[1]))


@pytest.mark.req("V3")
def test_the_functions_write_the_kinds_of_the_table_and_no_others() -> None:
    files = Path(str(resources.files("custody.store").joinpath("sql"))).rglob("*.sql")
    functions = "".join(file.read_text(encoding="utf-8") for file in files)
    entries = re.findall(r"INSERT INTO custody\.journal \(.*?(?:;|\$\$)", functions, re.DOTALL)
    written = set()
    for entry in entries:  # a settle writes several kinds at once; elsewhere the kind is the first text
        several = re.findall(r"SELECT '(\w+)'", entry)
        written.update(several or re.findall(r"(?:SELECT|VALUES \()[^']*'(\w+)'", entry)[:1])
    assert written == set(JOURNAL)
