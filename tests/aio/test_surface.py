"""The façade for asyncio is made of the blocking one: nothing is missing, and nothing differs."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest
from scripts.async_surface import LEFT_OUT

import custody
import custody.aio
from custody.aio.derived.transactions import Transactions
from custody.engine.granting import Granting
from custody.verbs import claim, producer, transactions

ROOT = Path(__file__).parents[2]
PAIRS = [
    (custody.aio.Custody, custody.Custody),
    (custody.aio.Lease, claim.Lease),
    (custody.aio.IdempotentProducer, producer.IdempotentProducer),
    (custody.aio.Transaction, transactions.Transaction),
    (Transactions, transactions.Transactions),
]
pytestmark = pytest.mark.req("X12", "X15")


def verbs_of(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


def test_the_derived_files_are_current() -> None:
    check = [sys.executable, "scripts/async_surface.py", "--check"]
    done = subprocess.run(check, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("mine", "its"), PAIRS, ids=lambda kind: kind.__name__)
def test_every_verb_is_there_or_left_out_for_a_reason(mine: type, its: type) -> None:
    missing = verbs_of(its) - verbs_of(mine) - LEFT_OUT.keys()
    assert missing == (verbs_of(Granting) - verbs_of(custody.aio.Custody) if its is custody.Custody else set())


@pytest.mark.parametrize(("mine", "its"), PAIRS, ids=lambda kind: kind.__name__)
def test_a_verb_has_the_same_parameters_defaults_and_docstring(mine: type, its: type) -> None:
    seen = 0
    for name, blocking in inspect.getmembers(its, inspect.isfunction):
        derived = getattr(mine, name, None)
        if name.startswith("_") or derived is None or name in ("close", "ping", "work", "transaction"):
            continue
        seen += 1
        assert inspect.iscoroutinefunction(derived) or name == "hint", f"{name} would block"
        wanted, found = inspect.signature(blocking).parameters, inspect.signature(derived).parameters
        assert list(found) == list(wanted)
        for parameter in wanted.values():
            assert (found[parameter.name].default, found[parameter.name].kind) == (parameter.default, parameter.kind)
        assert inspect.getdoc(derived) == inspect.getdoc(blocking)
    assert seen >= 4


def test_connect_and_work_take_what_the_blocking_ones_take() -> None:
    for mine, its, without in (
        (custody.aio.connect, custody.connect, {"share_commits"}),
        (custody.aio.Custody.work, custody.Custody.work, set()),
    ):
        wanted = {name: one.default for name, one in inspect.signature(its).parameters.items() if name not in without}
        assert {name: one.default for name, one in inspect.signature(mine).parameters.items()} == wanted


def test_all_is_exactly_what_can_be_imported() -> None:
    own = {
        name for name, value in vars(custody.aio).items() if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert set(custody.aio.__all__) == own | {"outbox"}


def test_a_program_without_asyncio_needs_neither_greenlet_nor_httpx() -> None:
    program = (
        "import sys\n"
        "for name in ('greenlet', 'httpx'): sys.modules[name] = None\n"
        "import asyncio, custody, custody.cli\n"
        "import custody.aio\n"
        "try: asyncio.run(custody.aio.connect('postgresql://nowhere').__aenter__())\n"
        "except custody.CustodyError as error: print(error.code, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "custody[asyncio]" in done.stdout
