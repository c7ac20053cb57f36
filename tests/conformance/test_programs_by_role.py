"""Least rights of whole programs: an app, a pipeline, transactions, the outbox's operator, a consumer's own records."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from tests.conformance.conftest import refused
from tests.conformance.roles import as_role, granting
from tests.conformance.test_roles import Granted
from tests.databases import Copy
from tests.integration import test_pipelines as pipelines
from tests.waiting import wait_for

import custody
from custody import App, Policy
from custody.cli import run
from custody.errors import PermissionDenied
from custody.outbox import Outbox
from custody.spark.database import arrow
from custody.store.roles import ROLES

pytestmark = [pytest.mark.core, pytest.mark.req("X13")]

PRODUCE = {"producer", "app", "worker", "operator"}
CONSUME = {"app", "worker", "operator"}
RUN = {"worker", "operator"}
LOOK = {"readonly", "operator"}


@pytest.fixture(scope="module")
def granted(server_url: str, template: str) -> Iterator[Granted]:
    with closing(Copy(server_url, template)) as copy, granting(copy.url), ExitStack() as close:
        found = Granted(copy, close)
        for topic in ("in", "out"):
            found.owner.create_topic(topic, partitions=2)
        found.owner.create_group("in", "g", pipelines.ORDERED)
        found.owner.create_group("in", "stock")
        yield found


def only(role: str, those: set[str], call: Callable[[], object]) -> bool:
    """Calls it; a role that may not is refused with a remedy. Whether it may."""
    if role in those:
        call()
        return True
    with refused("permission_denied") as found:
        call()
    assert "`custody grants`" in found[0].remedy
    return False


@pytest.mark.parametrize("role", ROLES)
def test_a_pipeline_is_driven_by_workers(granted: Granted, role: str) -> None:
    c = granted(role)
    if not only(role, RUN, lambda: c.drive("in", "g")):
        return
    pipelines.publish(c, 10)
    drive, _ = c.drive("in", "g")
    claim = drive.claim(100)
    report = pipelines.run(c, drive, claim.number)
    result = drive.commit(claim.number, report)
    assert (claim.messages, result.done, result.outputs) == (10, 10, 10)
    assert c.figures("in", "g").dead == 0
    with arrow.Planner(c.database_url) as planner:
        assert planner


@pytest.mark.parametrize("role", ROLES)
def test_transactions_are_for_those_who_may_ack(granted: Granted, role: str) -> None:
    c = granted(role)
    granted.owner.init_producer(role)
    epoch = granted.owner.producer(role).epoch

    def begun() -> UUID:
        return c.transactions.begin(role, epoch=epoch)[0]

    def whole() -> None:
        transaction = begun()
        c.transactions.add_all(transaction, [("out", custody.Outgoing(1)), ("in", custody.Outgoing(2))])
        lease = c.claim("in", "stock")
        if lease:
            c.transactions.ack(transaction, lease.lease_id)
        assert len(c.transactions.commit(transaction)) == 2

    only(role, CONSUME, whole)
    only(role, PRODUCE, lambda: c.transactions.abort(begun()))  # only the commit may ack
    only(role, LOOK, c.transactions.open)


@pytest.mark.parametrize("role", ROLES)
def test_an_app_starts_where_its_topics_and_groups_are(granted: Granted, role: str) -> None:
    app, seen = App("shop"), []

    @app.on("out", group="shop")
    def handle(message: custody.Message) -> None:
        seen.append(message.payload)

    if granted.owner.topic("out") and "shop" not in [one.name for one in granted.owner.groups("out")]:
        with pytest.raises(PermissionDenied, match="the app creates or changes group shop of topic out, and may not"):
            app.start(granted("app"))
        granted.owner.ensure_group("out", "shop", Policy(), start="latest")
    if role not in CONSUME:
        with refused("permission_denied"):
            granted(role).claim("out", "shop")
        return
    running = app.start(granted(role))
    thread = threading.Thread(target=running.run)
    thread.start()
    granted(role).publish("out", role)
    wait_for(lambda: role in seen, "the message is handled")
    running.stop()
    thread.join()


def test_doctor_says_which_roles_it_is_for(granted: Granted, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--json", "--database", as_role(granted.url, "app")]) == 1
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert "in the role readonly" in checks["role"]["remedy"]
    assert "extras" in checks  # it goes on
    run(["doctor", "--json", "--database", as_role(granted.url, "readonly")])
    assert "role" not in {check["name"] for check in json.loads(capsys.readouterr().out)["checks"]}


@pytest.mark.parametrize("role", ROLES)
def test_the_outbox_is_operated_by_operators_and_watched_by_readers(granted: Granted, role: str) -> None:
    def written() -> UUID:
        with psycopg.connect(as_role(granted.url, role)) as mine:
            return custody.outbox.write(mine, event_type="e", payload=role, destination=f"{role}:")

    if role in PRODUCE:
        event = written()
    else:
        with refused("permission_denied"):
            written()
        event = uuid4()
    with Outbox(as_role(granted.url, role)) as outbox:
        only(role, LOOK | CONSUME, outbox.stats)
        looks: list[Callable[[], Any]] = [outbox.events, outbox.audit]
        for look in looks:
            only(role, LOOK, look)
        for change in (
            lambda: outbox.kill([event]),
            lambda: outbox.replay(ids=[event]),
            lambda: outbox.prune("1h"),
            lambda: outbox.forget("1h"),
        ):
            only(role, {"operator"}, change)


@pytest.mark.parametrize("role", sorted(CONSUME))
def test_an_ack_joins_the_transaction_of_an_application(granted: Granted, role: str) -> None:
    granted.owner.publish("in", role)
    with psycopg.connect(as_role(granted.url, role)) as mine:
        lease = granted(role).claim("in", "stock", max_messages=100)
        assert lease.ack(connection=mine).settled == len(lease) > 0
