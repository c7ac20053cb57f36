"""Everything at one look: figures, rates, workers and what is wrong, on each way to call it."""

from __future__ import annotations

import psycopg
import pytest
from tests.conftest import Clock

import custody
from custody import Constant, Outgoing, Policy
from custody.model.status import TROUBLES, GroupStatus, troubles, worst_first

pytestmark = [pytest.mark.core, pytest.mark.req("N1")]


def make(c: custody.Custody, *groups: str) -> None:
    c.create_topic("orders", partitions=2)
    for group in groups:
        c.create_group("orders", group, Policy(max_attempts=1, backoff=Constant("0s")))


def test_what_each_group_and_worker_does(c: custody.Custody, direct: custody.Custody, clock: Clock) -> None:
    make(c, "mail", "stock")
    c.publish_many("orders", [Outgoing(n, partition=n % 2) for n in range(60)])
    lease = c.claim("orders", "stock", max_messages=30, partition=0)
    lease.nack(lease.messages[0], error="broken")
    lease.ack()
    clock.move(2)
    held = c.claim("orders", "stock", max_messages=10, partition=1)
    clock.move(1)

    found = c.status()
    assert found == direct.status()
    mail, stock = sorted(found.groups, key=lambda one: one.group)
    assert (mail.lag, mail.workers, mail.last_claim_age, mail.done_rate, mail.trouble) == (60, 0, None, 0, ())
    assert (stock.lag, stock.in_flight, stock.dead, stock.workers) == (20, 10, 1, 1)
    assert (stock.claimed_rate, stock.done_rate, stock.failed_rate) == (40 / 60, 29 / 60, 1 / 60)
    assert (stock.last_claim_age, stock.oldest_unresolved_age, stock.trouble) == (1.0, 3.0, ("dead letters",))
    assert [(one.topic, one.partitions, one.messages) for one in found.topics] == [("orders", 2, 60)]
    (worker,) = c.workers()
    assert (worker.group, worker.in_flight, worker.oldest_lease_age, worker.last_claim_age) == ("stock", 10, 1.0, 1.0)

    clock.move(120)
    assert c.workers() == [], "the lease has expired, and nothing happened in the last minute"
    assert {one.group: one.trouble for one in c.status().groups} == {
        "mail": ("no worker",),
        "stock": ("no worker", "dead letters"),
    }
    del held


def test_a_worker_that_only_holds_is_known(c: custody.Custody, clock: Clock) -> None:
    make(c, "stock")
    c.publish("orders", 1)
    c.claim("orders", "stock", visibility_timeout="1h")
    clock.move(600)
    (worker,) = c.workers()
    assert (worker.in_flight, worker.oldest_lease_age, worker.last_claim_age, worker.claimed_rate) == (1, 600, 600, 0)


def test_a_pause_is_no_missing_worker(c: custody.Custody, clock: Clock) -> None:
    make(c, "stock")
    c.publish("orders", 1)
    c.pause("orders", "stock", reason="deploy")
    clock.move(120)
    assert c.status().groups[0].trouble == ("paused",)


def test_schedules_in_trouble_and_the_backlog_of_the_outbox(
    c: custody.Custody, direct: custody.Custody, db: psycopg.Connection, clock: Clock
) -> None:
    c.create_topic("jobs")
    c.create_schedule("fine", topic="jobs", every="1h")
    c.create_schedule("report", topic="jobs", every="1m")
    with db.transaction():
        custody.outbox.write(db, event_type="paid", payload=1, destination="kafka:billing")
    clock.move(600)
    found = c.status()
    assert found == direct.status()
    assert [(one.name, one.state) for one in found.schedules] == [("report", "late")]
    assert [(one.destination, one.backlog) for one in found.outbox] == [("kafka:billing", 1)]


def test_the_groups_of_all_topics(c: custody.Custody) -> None:
    make(c, "mail", "stock")
    c.create_topic("jobs")
    c.create_group("jobs", "run", bare=True)
    assert [(one.topic, one.name) for one in c.all_groups()] == [
        ("jobs", "run"),
        ("orders", "mail"),
        ("orders", "stock"),
    ]
    assert c.all_groups()[1:] == c.groups("orders")


def group(name: str, *trouble: str, age: float | None = None, dead: int = 0) -> GroupStatus:
    figures = {"lag": 0, "waiting": 0, "in_flight": 0, "parked": 0, "dead": dead, "depth": 0, "workers": 0}
    rates = {"claimed_rate": 0.0, "done_rate": 0.0, "failed_rate": 0.0}
    rest = {"last_claim_age": None, "paused": False, "breaker": None, "bound": False, "pipeline": None}
    return GroupStatus(topic="t", group=name, trouble=trouble, oldest_unresolved_age=age, **figures, **rates, **rest)


def test_the_worst_comes_first() -> None:
    found = [
        group("fine", age=900.0),
        group("dead", "dead letters", age=1.0),
        group("older", "dead letters", age=5.0),
        group("broken", "breaker open", "dead letters"),
    ]
    assert [one.group for one in worst_first(found)] == ["broken", "older", "dead", "fine"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, ()),
        ({"lag": 5, "oldest_unresolved_age": 59.0}, ()),
        ({"lag": 5, "oldest_unresolved_age": 61.0}, ("no worker",)),
        ({"lag": 5, "oldest_unresolved_age": 61.0, "workers": 1}, ()),
        ({"lag": 5, "oldest_unresolved_age": 61.0, "pipeline": "running"}, ()),
        ({"lag": 5, "oldest_unresolved_age": 61.0, "pipeline": "stopped"}, ("no worker",)),
        ({"pipeline": "gone", "dead": 1}, ("pipeline gone", "dead letters")),
        ({"breaker": "open", "paused": True}, ("breaker open", "paused")),
        ({"breaker": "closed"}, ()),
    ],
)
def test_what_is_wrong(given: dict[str, object], expected: tuple[str, ...]) -> None:
    usual = {"lag": 0, "dead": 0, "oldest_unresolved_age": None, "workers": 0, "paused": False, "breaker": None}
    assert troubles(**{**usual, "pipeline": None, **given}) == expected  # type: ignore[arg-type]
    assert set(expected) <= set(TROUBLES)
