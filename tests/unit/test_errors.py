"""The errors: one tree, one code each, and a message that says what to do."""

from __future__ import annotations

import inspect
import pickle
import re
from pathlib import Path

import pytest

from custody import errors
from custody.errors import Busy, CustodyError, LeaseLost, Terminal, TopicNotFound, Transient, by_code

CLASSES = [kind for kind in vars(errors).values() if inspect.isclass(kind) and issubclass(kind, CustodyError)]
LEAVES = [kind for kind in CLASSES if not kind.__subclasses__()]


def drawn() -> dict[str, tuple[str | None, str | None]]:
    """The tree in the module's docstring: name → (parent, code)."""
    found: dict[str, tuple[str | None, str | None]] = {}
    path: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        text = line.lstrip("│├└─ ")
        if not text or not (found or text == "CustodyError"):
            continue
        depth = (len(line) - len(text)) // 4
        name, *rest = text.split()
        code = rest[0] if len(rest) == 1 else None
        path[depth:] = [name]
        found[name] = (path[depth - 1] if depth else None, code)
    return found


@pytest.mark.req("G20")
def test_the_tree_that_is_drawn_is_the_real_one() -> None:
    real = {kind.__name__: kind.__mro__[1].__name__ if kind is not CustodyError else None for kind in CLASSES}
    assert {name: parent for name, (parent, _) in drawn().items()} == real


@pytest.mark.req("G20")
def test_the_codes_that_are_drawn_are_the_real_ones() -> None:
    codes = {name: code for name, (_, code) in drawn().items() if code is not None}
    assert codes == {name: getattr(errors, name).code for name in codes}
    assert {kind.__name__ for kind in LEAVES} <= set(codes)


@pytest.mark.req("G20")
@pytest.mark.parametrize("kind", LEAVES)
def test_every_error_that_is_raised_has_a_code_of_its_own(kind: type[CustodyError]) -> None:
    assert "code" in vars(kind)
    assert [other for other in CLASSES if other.code == kind.code] == [kind, *kind.__subclasses__()]
    assert by_code()[kind.code] is kind
    assert 400 <= kind.status < 600


@pytest.mark.parametrize("kind", LEAVES)
def test_every_error_is_either_transient_or_terminal(kind: type[CustodyError]) -> None:
    assert issubclass(kind, Transient) is not issubclass(kind, Terminal)


@pytest.mark.parametrize("kind", CLASSES)
def test_without_a_message_the_docstring_speaks(kind: type[CustodyError]) -> None:
    assert str(kind()) == kind().message == (kind.__doc__ or "").strip() != ""


def test_the_text_is_the_message_and_then_the_remedy() -> None:
    error = TopicNotFound("there is no topic 'ordres'", "Create it first.")
    assert str(error) == "there is no topic 'ordres'. Create it first."
    assert (error.message, error.remedy) == ("there is no topic 'ordres'", "Create it first.")
    assert str(Busy(remedy="Now.")) == "Another transaction holds a lock that this call needs. Try again. Now."


def test_an_error_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(LeaseLost("gone", "Do not act on it.", lost=[1, 2])))
    assert (str(error), error.lost) == ("gone. Do not act on it.", (1, 2))


@pytest.mark.req("G20")
def test_the_docs_have_every_status_and_put_each_code_under_its_own() -> None:
    page = (Path(__file__).parents[2] / "docs/http.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ((?:\d{3}(?:, )?)+)(.*)$", page, re.MULTILINE)
    known = by_code()
    described = set()
    for numbers, text in rows:
        statuses = {int(number) for number in re.findall(r"\d+", numbers)}
        described |= statuses
        for code in set(re.findall(r"`(\w+)`", text)) & known.keys():
            assert known[code].status in statuses, code
    assert {kind.status for kind in CLASSES} <= described
