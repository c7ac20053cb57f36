"""The policy `dead_letter="topic"`, and the topic that belongs to it: made, used, refused, and kept from deletion."""

from __future__ import annotations

import psycopg
import pytest
from tests.integration.stream import everything
from tests.integration.test_dead_letter_topics import DLQ, GROUP, TOPIC, copies, original, policy, start

import custody
from custody import Custody, Outgoing, Policy
from custody.errors import Conflict, InvalidArgument, InvalidPolicy

pytestmark = [pytest.mark.core, pytest.mark.req("G10")]


def test_the_policy_makes_the_topic_and_survives_a_round_trip(c: Custody) -> None:
    c.create_topic(TOPIC, partitions=3)
    group = c.create_group(TOPIC, GROUP, Policy(dead_letter="topic"))
    assert group.policy is not None
    assert group.policy.dead_letter == "topic"
    assert c.topic(DLQ).partitions == 3
    assert c.update_group(TOPIC, GROUP, Policy()).policy == c.group(TOPIC, GROUP).policy
    assert c.group(TOPIC, GROUP).policy.dead_letter == "keep"  # type: ignore[union-attr]
    assert Policy.from_mapping({"dead_letter": "topic"}).dead_letter == "topic"
    with pytest.raises(InvalidPolicy):
        Policy(dead_letter="elsewhere")  # type: ignore[arg-type]


def test_an_update_makes_the_topic_and_counts_from_then_on(c: Custody) -> None:
    start(c, [Outgoing(n) for n in range(3)], dead_letter="keep")
    c.claim(TOPIC, GROUP).nack()
    with pytest.raises(custody.errors.TopicNotFound):
        c.topic(DLQ)
    c.update_group(TOPIC, GROUP, policy())
    c.claim(TOPIC, GROUP).nack()
    c.update_group(TOPIC, GROUP, policy(dead_letter="keep"))
    c.claim(TOPIC, GROUP).nack()
    assert [original(copy)[2] for copy in copies(c)] == [1]


def test_what_is_there_already_is_used(c: Custody) -> None:
    c.create_topic(DLQ)
    c.publish(DLQ, "before")
    start(c, [Outgoing(1)])
    c.claim(TOPIC, GROUP).nack()
    assert [copy.payload for copy in copies(c)] == ["before", 1]


def test_a_name_that_would_be_too_long_is_refused(c: Custody, db: psycopg.Connection) -> None:
    c.create_topic("t" * 196)
    c.create_group("t" * 196, GROUP, policy())
    assert c.topic("t" * 196 + "-dlq")
    c.create_topic("t" * 197)
    c.create_group("t" * 197, "other")
    before = everything(db)
    with pytest.raises(InvalidArgument, match=r"more than 200 characters.*shorter name"):
        c.create_group("t" * 197, GROUP, policy())
    with pytest.raises(InvalidArgument, match="more than 200 characters"):
        c.update_group("t" * 197, "other", policy())
    assert everything(db) == before


def test_a_dead_letter_topic_has_none_of_its_own(c: Custody, db: psycopg.Connection) -> None:
    start(c, [])
    before = everything(db)
    with pytest.raises(InvalidArgument, match="is a dead-letter topic"):
        c.create_group(DLQ, GROUP, policy())
    assert everything(db) == before


def test_a_dead_letter_topic_in_use_cannot_be_deleted(c: Custody, db: psycopg.Connection) -> None:
    start(c, [Outgoing(1)])
    c.claim(TOPIC, GROUP).nack()
    before = everything(db)
    with pytest.raises(
        Conflict, match=r"group 'stock' of topic 'orders' writes its dead letters.*dead_letter = keep"
    ) as refused:
        c.delete_topic(DLQ)
    assert refused.value.code == "conflict"
    assert everything(db) == before
    c.update_group(TOPIC, GROUP, policy(dead_letter="keep"))
    c.delete_topic(DLQ)
    c.update_group(TOPIC, GROUP, policy())
    assert copies(c) == [], "made anew"
    c.delete_topic(TOPIC)
    c.delete_topic(DLQ)


def test_the_copies_outlive_their_topic(c: Custody) -> None:
    start(c, [Outgoing(1)])
    c.claim(TOPIC, GROUP).nack()
    c.delete_topic(TOPIC)
    assert len(copies(c)) == 1


def test_a_bare_group_has_no_dead_letters(c: Custody) -> None:
    c.create_topic(TOPIC)
    c.create_group(TOPIC, "bare", bare=True)
    assert [topic.name for topic in c.topics()] == [TOPIC]
