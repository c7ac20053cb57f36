"""Drivers, tasks and sinks of pipelines side by side."""

from __future__ import annotations

import pytest
from tests.interleaving.conftest import Make
from tests.interleaving.session import GROUP, TOPIC, Session

import custody

pytestmark = [pytest.mark.core, pytest.mark.req("S4")]


def test_a_takeover_waits_for_what_the_old_driver_does(make: Make, one: Session, two: Session) -> None:
    make("a")

    def start(session: Session) -> int:
        return int(session.call("start_pipeline", topic=TOPIC, group=GROUP, driver=session.name)[0][1])

    epoch = start(one)
    one.commit()
    one.call("keep_claim", topic=TOPIC, group=GROUP, epoch=epoch)
    taking_over = two.blocked(start, two)
    one.commit()
    assert taking_over.result(10) > epoch


def test_a_pipeline_leaves_a_partition_that_a_worker_claims_from(make: Make, one: Session, two: Session) -> None:
    make("ab")
    epoch = two.call("start_pipeline", topic=TOPIC, group=GROUP, driver="two")[0][1]
    two.commit()
    assert one.claim(1).offsets == [0]
    two.connection.execute("SET lock_timeout = '2s'")
    ((claim, messages, reason, _),) = two.call("claim_batch", topic=TOPIC, group=GROUP, epoch=epoch, max=9)
    assert (claim, messages, reason) == (None, 0, "busy")


def test_two_who_open_a_stage_at_once_open_one(one: Session, two: Session) -> None:
    assert one.call("open_stage", stage="staged_s") == [("staged_s",)]
    second = two.blocked(two.call, "open_stage", stage="staged_s")
    one.commit()
    assert second.result(10) == [("staged_s",)]
    two.call("drop_stage", stage="staged_s")
    two.commit()


def test_a_batch_that_is_replayed_before_its_commit_is_published_once(
    make: Make, c: custody.Custody, one: Session, two: Session
) -> None:
    make()

    def commit(session: Session) -> object:
        return session.call(
            "sink_commit",
            query="q",
            batch=1,
            stage="staged_s",
            attempts=[],
            topics=[1],
            partitions=[0],
            counts=[0],
            of=[1],
        )[0][0]

    one.call("open_stage", stage="staged_s")
    one.commit()
    assert commit(one) == 0
    again = two.blocked(commit, two)
    one.commit()
    assert again.result(10) is None
    two.call("drop_stage", stage="staged_s")
    two.commit()
