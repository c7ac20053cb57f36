"""A remedy names commands where the error names verbs."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest
from tests.cli.conftest import Run

import custody
from custody import Custody
from custody.cli.remedies import in_commands

PACKAGE = Path(custody.__file__).parent


@pytest.mark.parametrize(
    ("remedy", "shown"),
    [
        ("Create it first (create_topic), or look.", "Create it first (`custody topics create`), or look."),
        ("Use `c.create_group(…)`.", "Use `custody groups create`."),
        ("Change its policy (update_group).", "Change its policy (`custody groups update`)."),
        ("Publish it, or claim less.", "Publish it, or claim less."),
        ("Set handler_timeout = none.", "Set handler_timeout = none."),
    ],
)
def test_verbs_become_commands(remedy: str, shown: str) -> None:
    assert in_commands(remedy) == shown


def test_errors_show_commands(quick: Run) -> None:
    assert "(`custody topics create`)" in quick("dead", "orders", "stock", code=1).err
    assert "`custody topics create`" in quick("dead", "orders", "stock", "--json", code=1).error["remedy"]


NO_COMMAND = {"claim", "init_producer"}
"""Verbs of programs alone."""


def test_every_verb_that_a_remedy_names_has_a_command() -> None:
    verbs = {name for name, _ in inspect.getmembers(Custody, inspect.isfunction) if "_" in name.strip("_")}
    texts = [
        text for file in PACKAGE.rglob("*.sql") for text in re.findall(r"'([A-Z][^'\n]* [^'\n]*)'", file.read_text())
    ]
    for file in PACKAGE.rglob("*.py"):
        constants = [one.value for one in ast.walk(ast.parse(file.read_text())) if isinstance(one, ast.Constant)]
        texts += [text for text in constants if isinstance(text, str) and re.match(r"[A-Z][^\n]* [^\n]*\.$", text)]
    named = {word for text in texts for word in re.findall(r"\b[a-z]+(?:_[a-z]+)+\b", text)} & verbs
    assert {"create_topic", "create_group", "update_group"} <= named
    assert {verb for verb in named if f"({verb})" == in_commands(f"({verb})")} <= NO_COMMAND
