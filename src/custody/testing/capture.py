"""Writes an incident as a test for pytest, which uses the fixtures of `pytest_custody`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pprint import pformat
from typing import Literal

from custody.errors import InvalidArgument
from custody.model.entities import Message
from custody.testing.incident import Incident
from custody.testing.literals import WIDTH, literal

Expected = Literal["done", "recorded"]

_HANDLER = re.compile(r"(?P<module>[^\W\d]\w*(\.[^\W\d]\w*)*):(?P<name>[^\W\d]\w*)(?P<rest>(\.[^\W\d]\w*)*)")

_HEAD = '''"""{title}

{expectation}
It has a database and a clock of its own.
"""

import pytest

from custody import Outgoing, Policy
from custody.testing import {names}

TOPIC = {topic!r}
GROUP = {group!r}
POLICY = Policy.from_mapping(
{policy}
)
'''
_EXPECTATIONS: dict[Expected, str] = {
    "done": "The test fails until the handler can process the message.",
    "recorded": "The test passes while the handler does what it did then: the same outcomes with the same errors.",
}
_ASSERTIONS: dict[Expected, str] = {"done": "again.done", "recorded": "again.as_recorded"}
_TEST = """

@pytest.fixture
def handler():
{handler}


def test_{name}(custody_db, drain, freeze, handler):
    freeze({first!r})
    custody_db.create_topic(TOPIC)
    custody_db.create_group(TOPIC, GROUP, POLICY)
    for published_at, message in BEFORE:
        freeze(published_at)
        custody_db.publish_many(TOPIC, [message])
        drain(TOPIC, GROUP, handler)
    published_at, message = MESSAGE
    freeze(published_at)
    custody_db.publish_many(TOPIC, [message])
    again = replay(custody_db, TOPIC, GROUP, handler, ATTEMPTS)
    assert {assertion}, again.report()
"""


def written(incident: Incident, *, handler: str | None, expected: Expected = "done") -> str:
    """The source of a test. `handler` is `module:name`; without one the test fails with a message that says so."""
    message = incident.message
    place = f"{message.topic}/{message.partition}/{message.offset}"
    before = [_published(one) for one in incident.before]
    last = _published(message)
    packed = any("unpacked(" in one for one in (*before, last))
    parts = [
        _HEAD.format(
            names="Attempt, replay, unpacked" if packed else "Attempt, replay",
            title=f"What happened to {place} in group {incident.group}, captured by `custody capture`.",
            expectation=_EXPECTATIONS[expected],
            topic=message.topic,
            group=incident.group,
            policy=_indented(pformat(incident.policy.plain(), width=WIDTH - 4, sort_dicts=False)),
        ),
        "\n# What came before it in its key, oldest first: when it was published, and the message.\nBEFORE = [\n",
        *(f"{_indented(one)},\n" for one in before),
        f"]\nMESSAGE = {last}\n",
        "\n# Its attempts: when, the outcome, the error.\nATTEMPTS = [\n",
        *(f"    Attempt({at!r}, {outcome!r}, {error!r}),\n" for at, outcome, error in incident.attempts),
        "]\n",
        *_comments(incident.traceback),
        _TEST.format(
            handler=_fixture(handler),
            name=re.sub(r"\W", "_", place, flags=re.ASCII),
            first=incident.messages[0].published_at.isoformat(),
            assertion=_ASSERTIONS[expected],
        ),
    ]
    return "".join(parts)


def _published(message: Message) -> str:
    rest = f", key={message.key!r}" if message.key is not None else ""
    rest += f", headers={message.headers!r}" if message.headers else ""
    return f"({message.published_at.isoformat()!r}, Outgoing({literal(message.payload)}{rest}))"


def _fixture(handler: str | None) -> str:
    if handler is None:
        says = "name the handler: return it from this fixture, or capture with --handler MODULE:NAME"
        return f"    pytest.fail({says!r})"
    found = _HANDLER.fullmatch(handler)
    if found is None:
        raise InvalidArgument(f"{handler!r} is not MODULE:NAME", "Give one such as shop.handlers:apply.")
    return f"    from {found['module']} import {found['name']}\n\n    return {found['name']}{found['rest']}"


def _comments(traceback: str | None) -> Iterator[str]:
    """The end of the last traceback, as comments without any character that could end a line."""
    if traceback:
        yield "\n# The end of the last traceback:\n"
        for line in traceback.splitlines():
            yield f"#   {repr(line)[1:-1]}\n"


def _indented(text: str) -> str:
    """Only where no string goes over several lines: in a packed one spaces do not count."""
    return "\n".join(f"    {line}" for line in text.splitlines())
