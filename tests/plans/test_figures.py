"""What a look at all groups reads does not grow with the log."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from tests.plans.conftest import CASES
from tests.plans.test_plans import done_by

import custody
from custody import Outgoing

pytestmark = [pytest.mark.core, pytest.mark.req("G18", "N1")]

GROUPS, PARTITIONS = 40, 8
FIGURES = "SELECT * FROM custody.group_figures()"
TOPICS = "SELECT * FROM custody.topic_figures()"


def test_a_long_log_is_not_scanned_nor_the_open_cases_more_than_once(big: psycopg.Connection[Any]) -> None:
    rows, done = done_by(big, FIGURES)
    assert [row[1] for row in rows] == ["ordered", "plain", "troubled"]
    assert rows[2][3] == CASES
    read = {table: sum(counts) for table, counts in done.items() if sum(counts) > 20}
    assert read.keys() <= {"cases"}, "the end of the log, and the oldest message of each group"
    assert read["cases"] <= CASES


def test_the_tails_of_topics_are_looked_up(big: psycopg.Connection[Any]) -> None:
    rows, done = done_by(big, TOPICS)
    assert len(rows) == 1
    assert {table: sum(counts) for table, counts in done.items() if sum(counts) > 5} == {}


def test_a_status_takes_as_many_statements_for_many_groups(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    statements: list[object] = []
    execute = psycopg.Cursor.execute

    def counted(self: Any, query: Any, *given: Any, **rest: Any) -> Any:
        statements.append(query)
        return execute(self, query, *given, **rest)

    with custody.connect(database_url) as c:
        c.create_topic("orders", partitions=4)
        c.publish_many("orders", [Outgoing(n, partition=n % 4) for n in range(40)])
        counts = []
        for groups in (1, 12):
            for n in range(groups):
                c.create_group("orders", f"group-{groups}-{n}")
                c.claim("orders", f"group-{groups}-{n}", max_messages=5)
            c.status()  # the first one prepares
            with monkeypatch.context() as patch:
                patch.setattr(psycopg.Cursor, "execute", counted)
                statements.clear()
                assert len(c.status().groups) == (1 if groups == 1 else 13)
                counts.append(len(statements))
    assert counts[0] == counts[1] <= 12


def test_many_groups_cost_a_few_look_ups_for_each_partition(database_url: str, db: psycopg.Connection[Any]) -> None:
    with custody.connect(database_url) as c:
        c.create_topic("busy", partitions=PARTITIONS)
        c.publish_many("busy", [Outgoing(n, partition=n % PARTITIONS) for n in range(5000)])
        for n in range(GROUPS):
            c.create_group("busy", f"group-{n}")
            lease = c.claim("busy", f"group-{n}", max_messages=20)
            lease.ack(*lease.messages[:3])
            lease.nack(lease.messages[5])
    with db.transaction():
        rows, done = done_by(db, FIGURES)
    assert len(rows) == GROUPS
    most = 4 * GROUPS * PARTITIONS
    assert {table: sum(counts) for table, counts in done.items() if sum(counts) > most} == {}
