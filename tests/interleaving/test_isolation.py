"""Verbs decide on what they read after their locks, so they refuse a transaction with one snapshot for all."""

from __future__ import annotations

from collections.abc import Callable
from uuid import uuid4

import psycopg
import pytest
from tests.interleaving.conftest import Make
from tests.interleaving.session import GROUP, TOPIC, Session
from tests.interleaving.test_retention import create_group

pytestmark = pytest.mark.core

VERBS: dict[str, Callable[[Session], object]] = {
    "publish": lambda s: s.publish(["a"]),
    "init_producer": lambda s: s.call("init_producer", producer="p"),
    "create_group": create_group,
    "claim": lambda s: s.claim(1),
    "settle": lambda s: s.ack(uuid4(), 0),
    "ack_lease": lambda s: s.ack_lease(uuid4()),
    "extend": lambda s: s.extend(uuid4(), 30),
    "redrive": lambda s: s.redrive(),
    "discard": lambda s: s.call("discard", topic=TOPIC, group=GROUP),
    "rewind": lambda s: s.rewind(0),
    "skip": lambda s: s.skip(0),
    "release_key": lambda s: s.release_key("a"),
    "seal_segment": lambda s: s.seal(),
    "drop_segments": lambda s: s.drop(),
    "delete_group": lambda s: s.call("delete_group", topic=TOPIC, group=GROUP),
    "delete_topic": lambda s: s.call("delete_topic", topic=TOPIC),
}


@pytest.mark.parametrize("level", [psycopg.IsolationLevel.REPEATABLE_READ, psycopg.IsolationLevel.SERIALIZABLE])
def test_every_verb_refuses_one_snapshot_for_all(make: Make, one: Session, level: psycopg.IsolationLevel) -> None:
    make("a")
    one.isolation(level)
    for name, verb in VERBS.items():
        with pytest.raises(psycopg.Error) as refused:
            verb(one)
        assert refused.value.diag.message_detail == "isolation_level", name
        one.rollback()
