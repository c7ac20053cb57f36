"""Batches through a migration and at the end of their topic: each segment has functions of its own."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from tests.conformance.roles import as_role, granting
from tests.integration.test_batches import GROUP, TOPIC, content, expected, rows, some

import custody
from custody import Custody, Policy

pytestmark = pytest.mark.core

OWN = "SELECT proname FROM pg_proc WHERE proname ~ '^(append|slices|keys)_[0-9]+$' ORDER BY 1"


@pytest.mark.chaos
def test_after_a_migration_batches_are_read_and_written(db: psycopg.Connection[Any], database_url: str) -> None:
    """Of sealed and of open segments, also by roles that have only the rights they need."""
    sent = some(100)
    with granting(database_url):
        with custody.connect(database_url) as c:
            c.create_topic(TOPIC)
            c.create_group(TOPIC, GROUP, Policy())
            c.publish_many(TOPIC, sent[:50])
            db.execute("SELECT custody.seal_segment(%s)", [TOPIC])
            c.publish_many(TOPIC, sent[50:70])
        before = db.execute(OWN).fetchall()
        db.execute("UPDATE custody.release SET digest = 'another'")
        custody.migrate(database_url)
        assert db.execute(OWN).fetchall() == before
        with custody.connect(as_role(database_url, "app")) as c:
            c.publish_many(TOPIC, sent[70:])
            assert rows(db) == [50, 20, 30]
            assert content(c.read(TOPIC, max_messages=200)) == expected(sent)
            lease = c.claim(TOPIC, GROUP, max_messages=60)
            assert content(list(lease)) == expected(sent)[:60]
            lease.nack(lease.messages[3], requeue=False)
            lease.ack()
            assert content(list(c.claim(TOPIC, GROUP, max_messages=60))) == expected(sent)[60:]


def test_a_topic_leaves_no_function_behind(c: Custody, db: psycopg.Connection[Any]) -> None:
    c.create_topic(TOPIC)
    for _ in range(3):
        c.publish_many(TOPIC, some(30))
        db.execute("SELECT custody.seal_segment(%s)", [TOPIC])
    db.execute("SELECT custody.drop_segments(%s)", [TOPIC])
    assert len(db.execute(OWN).fetchall()) == 4
    c.delete_topic(TOPIC)
    assert db.execute(OWN).fetchall() == []
