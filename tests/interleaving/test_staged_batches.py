"""Rows of the log that a task has staged, beside those who seal, drop, publish and clear away."""

from __future__ import annotations

import psycopg
import pytest
from tests.interleaving.conftest import Make
from tests.interleaving.session import TOPIC, Session

import custody
from custody.store import packed
from custody.store.staged_batches import batches

pytestmark = [pytest.mark.core, pytest.mark.req("S4")]

COUNT = 20


def stage(session: Session, attempt: int) -> None:
    """One row of messages for partition 0. The stage is committed, and the row is not."""
    packed.register(session.connection)
    session.call("open_stage", stage="staged_s")
    ((segment, base),) = session.call("stage_segment", stage="staged_s", topic_id=1)
    session.commit()
    made = batches([("k", b"j", b"%d" % n, None) for n in range(COUNT)], [(0, n) for n in range(COUNT)])
    assert made is not None
    (batch,) = made
    place = {"segment": segment, "base": base, "attempt": attempt, "topic_id": 1, "partition": 0}
    session.call("stage_batch", stage="staged_s", **place, **batch.arguments())


def publish(session: Session, attempt: int) -> int:
    placed = {"attempts": [attempt], "topics": [1], "partitions": [0], "counts": [COUNT], "of": [1]}
    return int(session.call("sink_commit", query="q", batch=attempt, stage="staged_s", **placed)[0][0])


def payloads(c: custody.Custody) -> list[object]:
    return [message.payload for message in c.read(TOPIC, 0, max_messages=1000)]


def hidden(db: psycopg.Connection) -> int:
    row = db.execute("SELECT count(*) FROM custody.log WHERE partition < 0").fetchone()
    assert row is not None
    return int(row[0])


def test_a_stage_is_not_cleared_while_a_task_writes(
    make: Make, db: psycopg.Connection, one: Session, two: Session
) -> None:
    make()
    stage(one, 1)
    assert two.call("drop_stage", stage="staged_s") == [(False,)]
    two.commit()
    one.commit()
    assert hidden(db) == 1
    assert two.call("drop_stage", stage="staged_s") == [(True,)]
    two.commit()
    assert hidden(db) == 0
    with pytest.raises(psycopg.Error, match="no stage"):
        one.call("stage_segment", stage="staged_s", topic_id=1)


def test_a_task_that_comes_after_the_stage_was_dropped_writes_nothing(
    make: Make, db: psycopg.Connection, one: Session, two: Session
) -> None:
    make()
    stage(one, 1)
    one.connection.rollback()
    two.call("drop_stage", stage="staged_s")
    two.commit()
    with pytest.raises(psycopg.errors.UndefinedTable):
        one.connection.execute(
            "SELECT custody.stage_batch('staged_s', (SELECT max(segment_id) FROM custody.segments), 1, 1, 1, 0, 0, 0, "
            "0, '{0}', '{}', '{j}', '{}', '1', '{1}')"
        )
    one.connection.rollback()
    assert hidden(db) == 0


def test_a_commit_that_waits_for_a_seal_copies_into_the_new_segment(
    make: Make, c: custody.Custody, db: psycopg.Connection, one: Session, two: Session
) -> None:
    make()
    stage(one, 1)
    one.commit()
    two.call("seal_segment", topic=TOPIC)
    committing = one.blocked(publish, one, 1)
    two.commit()
    assert committing.result(10) == COUNT
    one.commit()
    assert payloads(c) == list(range(COUNT))
    assert hidden(db) == 0
    places = db.execute('SELECT partition, "offset", segment_id FROM custody.log').fetchall()
    assert (
        places
        == db.execute("SELECT 0, 19::bigint, segment_id FROM custody.segments WHERE sealed_at IS NULL").fetchall()
    )
    two.call("drop_stage", stage="staged_s")
    two.commit()


def test_a_seal_and_a_publisher_wait_for_the_commit(
    make: Make, c: custody.Custody, one: Session, two: Session, three: Session
) -> None:
    make()
    stage(one, 1)
    one.commit()
    publish(one, 1)
    sealing = two.blocked(two.call, "seal_segment", topic=TOPIC)
    one.commit()
    sealing.result(10)
    two.commit()
    stage(one, 2)
    one.commit()
    publish(one, 2)
    publishing = three.blocked(three.call, "send", topic=TOPIC, payload='"last"')
    one.commit()
    assert publishing.result(10) == [(0, 2 * COUNT)]
    three.commit()
    assert payloads(c) == [*range(COUNT), *range(COUNT), "last"]
    one.call("drop_stage", stage="staged_s")
    one.commit()
