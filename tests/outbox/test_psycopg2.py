"""The outbox on a connection of psycopg2, and of SQLAlchemy with psycopg2."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import psycopg2
import psycopg2.extras
import pytest
from sqlalchemy import create_engine, text

import custody
from custody.errors import DatabaseUnavailable, InvalidArgument, OutboxRefused
from custody.outbox import Outbox

pytestmark = [pytest.mark.core, pytest.mark.req("O1", "X12")]


@pytest.fixture
def old(outbox_url: str) -> Iterator[Any]:
    with closing(psycopg2.connect(outbox_url, cursor_factory=psycopg2.extras.RealDictCursor)) as connection:
        yield connection


def test_an_event_is_part_of_the_transaction(outbox: Outbox, old: Any) -> None:
    for payload in ({"n": 1}, {"n": 2}):
        custody.outbox.write(old, event_type="placed", payload=payload, destination="test:")
        assert len(outbox.events()) == 0
        if payload == {"n": 1}:
            old.rollback()
    old.commit()
    assert [event.payload for event in outbox.events()] == [{"n": 2}]


def test_every_field_arrives(outbox: Outbox, old: Any) -> None:
    given, later = uuid4(), datetime(2040, 1, 1, tzinfo=UTC)
    custody.outbox.lock(old, ["k", "it's 100%"])
    written = custody.outbox.write(
        old,
        event_type="placed",
        payload=b"\x00\xff",
        destination="test:x",
        headers={"trace": "it's 100% \\ \N{SNOWMAN}"},
        partition_key="p",
        ordering_key="it's 100%",
        available_at=later,
        event_id=given,
    )
    old.commit()
    (event,) = outbox.events()
    assert written == event.event_id == given
    assert (event.payload, event.destination) == (b"\x00\xff", "test:x")
    assert event.headers.items() >= {"trace": "it's 100% \\ \N{SNOWMAN}"}.items()
    assert (event.partition_key, event.ordering_key, event.available_at) == ("p", "it's 100%", later)


def test_refusals_are_the_same_errors(outbox: Outbox, old: Any) -> None:
    with pytest.raises(InvalidArgument, match="an event needs a type") as refused:
        custody.outbox.write(old, event_type="", payload=1)
    assert refused.value.remedy == "Give a name for what happened, such as order-placed."
    old.rollback()
    given = uuid4()
    custody.outbox.write(old, event_type="placed", payload=1, destination="test:", event_id=given)
    with pytest.raises(OutboxRefused, match=str(given)):
        custody.outbox.write(old, event_type="placed", payload=1, destination="test:", event_id=given)
    old.close()
    with pytest.raises(DatabaseUnavailable):
        custody.outbox.write(old, event_type="placed", payload=1)


def test_of_sqlalchemy(outbox: Outbox, outbox_url: str) -> None:
    engine = create_engine(outbox_url.replace("postgresql://", "postgresql+psycopg2://", 1))
    with engine.connect() as connection:
        custody.outbox.write(connection, event_type="placed", payload=1)
        connection.rollback()
        connection.execute(text("SELECT 1"))
        custody.outbox.write(connection, event_type="placed", payload=2)
        connection.commit()
    engine.dispose()
    assert [event.payload for event in outbox.events()] == [2]
