"""The scripts that look after the house: mutants of the SQL, pinned versions, coverage."""

from __future__ import annotations

import importlib
import re
import tomllib
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def script(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return importlib.import_module(request.param)


def of(name: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("script", [name], indirect=True, ids=[name])


@of("mutants")
def test_each_mutant_has_a_name_of_its_own_and_removes_something(script: ModuleType) -> None:
    mutants = [mutant for path in script.files() for mutant in script.mutants_of(path)]
    assert len(mutants) > 100
    assert [name for name, times in Counter(mutant.name for mutant in mutants).items() if times > 1] == []
    for mutant in mutants:
        assert mutant.mutated() != mutant.original()
        for statement in (mutant.mutated(), mutant.original()):
            assert re.match(rf"CREATE OR REPLACE FUNCTION custody\.{mutant.function}\(", statement)
            assert statement.endswith(";")


@of("mutants")
def test_every_explained_mutant_is_one_and_has_a_reason(script: ModuleType) -> None:
    names = {mutant.name for path in script.files() for mutant in script.mutants_of(path)}
    explained = tomllib.loads((ROOT / "docs/mutants.toml").read_text())
    assert sorted(explained.keys() - names) == [], "these are no mutants any more"
    assert [name for name, reason in explained.items() if len(reason) < 20] == []


@of("mutants")
def test_fences_are_found_outside_of_comments_and_assignments(script: ModuleType) -> None:
    statement = """CREATE FUNCTION custody.f() RETURNS void LANGUAGE plpgsql AS $$
    BEGIN
        -- lease_id = x FOR UPDATE
        UPDATE custody.leases SET deadline = p_now WHERE lease_id = p_lease_id;
        PERFORM FROM custody.heads ORDER BY topic_id,
            partition FOR UPDATE;
        UPDATE custody.outbox SET claimed_by = NULL WHERE claimed_by = p_claim;
        IF v_epoch <> p_epoch THEN RETURN; END IF;
    END $$;
    """
    assert [(kind, instead) for kind, _, _, instead, _ in script.fences_of(statement)] == [
        ("lock", ""),
        ("order", "ORDER BY topic_id DESC, partition DESC"),
        ("lease", "true"),
        ("lease", "true"),
        ("epoch", "false"),
    ]


@of("mutants")
def test_a_function_that_postgresql_puts_into_others_is_reached_by_them(script: ModuleType) -> None:
    callers = script.callers()
    assert callers["live_leases"] == {"claim_partition"}
    assert "outbox_claim" in callers["outbox_stats"], "no function names it, so it is reached by those beside it"
    assert "claim" not in callers, "calls of a function in PL/pgSQL are counted"


def audited(**flaws: list[str]) -> list[dict[str, Any]]:
    return [
        {"name": name, "version": "1", "vulns": [{"id": flaw, "fix_versions": ["2"]} for flaw in some]}
        for name, some in flaws.items()
    ]


@of("pins")
def test_an_audit_says_what_it_found_and_what_it_could_not_look_up(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script, "pins", lambda: {"a": "1", "b": "1"})
    assert script.show(audited(a=[], b=[])) == 0
    assert script.show(audited(a=[], b=["CVE-1"])) == 1
    assert "b 1: CVE-1, fixed in 2" in capsys.readouterr().out
    for incomplete in (audited(a=[]), [*audited(a=["CVE-1"]), {"name": "b", "skip_reason": "no such project"}]):
        with pytest.raises(SystemExit) as ended:
            script.show(incomplete)
        assert ended.value.code == 2
        assert "COULD NOT LOOK UP 1 OF 2 PINS" in capsys.readouterr().err


@of("measure_coverage")
def test_coverage_is_summed_by_folder_and_never_rounded_up(script: ModuleType) -> None:
    def file(statements: int, lines: int, branches: int, covered: int) -> dict[str, Any]:
        numbers = {"num_statements": statements, "covered_lines": lines, "num_branches": branches}
        return {"summary": {**numbers, "covered_branches": covered, "percent_covered": 1.5}}

    files = {
        "src/custody/claim.py": file(10, 10, 0, 0),
        "src/custody/http/app.py": file(1000, 999, 10, 5),
        "src/custody/http/deep/er.py": file(1000, 1000, 10, 10),
    }
    assert script.table({"files": files}).splitlines()[2:] == [
        "| custody | 10 | 100.0 % | – |",
        "| custody/http | 2,000 | 99.9 % | 75.0 % |",
        "| all | 2,010 | 99.9 % | 75.0 % |",
    ]
