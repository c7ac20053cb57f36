"""What a role needs for its part of an outbox, and no more: as docs/outbox.md says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg
import pytest

import custody
from custody.outbox import Outbox
from custody.relay import Relay

DOCUMENT = Path(__file__).parents[2] / "docs" / "outbox.md"


@pytest.fixture
def roles(alone_url: str) -> Iterator[None]:
    """The roles of the document, with what it grants them."""
    (granted,) = re.findall(r"```text\n(GRANT .*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    with psycopg.connect(alone_url, autocommit=True) as connection:
        connection.execute("CREATE ROLE app; CREATE ROLE relay; CREATE ROLE operator")
        connection.execute(granted.encode())
        yield
        connection.execute("DROP OWNED BY app, relay, operator; DROP ROLE app, relay, operator")


def as_role(url: str, role: str) -> str:
    return f"{url}{'&' if '?' in url else '?'}options=-c%20role%3D{role}"


def test_each_role_can_do_its_part(alone_url: str, roles: None) -> None:
    seen: list[Any] = []

    def written(payload: int) -> UUID:
        with psycopg.connect(as_role(alone_url, "app")) as mine:
            return custody.outbox.write(mine, event_type="e", payload=payload, destination="test:", ordering_key="k")

    def relayed() -> int:
        publishers = {"test": lambda event: seen.append(event.payload)}
        return Relay(as_role(alone_url, "relay"), publishers).drain("20s").published

    first = written(1)
    assert relayed() == 1
    with Outbox(as_role(alone_url, "operator")) as outbox:
        second = written(2)
        assert outbox.kill([second]) == [second]
        assert outbox.replay(ids=[first], states=["PUBLISHED"]) == [first]
        assert relayed() == 1
        assert (outbox.prune("0s", states=["DEAD", "PUBLISHED"]), outbox.forget("0s")) == (2, 0)
        assert len(outbox.audit()) == 4
        assert [finding for finding in outbox.verify() if not finding.passed] == []
    assert seen == [1, 1]


@pytest.mark.parametrize(
    "statement",
    [
        "SELECT payload FROM custody.outbox",
        "UPDATE custody.outbox SET available_at = now()",
        "DELETE FROM custody.outbox",
        "SELECT custody.outbox_replay()",
    ],
)
def test_an_application_can_write_events_and_nothing_else(alone_url: str, roles: None, statement: str) -> None:
    with psycopg.connect(as_role(alone_url, "app")) as mine, pytest.raises(psycopg.errors.InsufficientPrivilege):
        mine.execute(statement.encode())
