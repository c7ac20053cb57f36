"""Least rights: what each role of `custody grants` may do, and that everything else is refused with a remedy."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from functools import partial
from itertools import pairwise
from typing import Any

import psycopg
import pytest
from tests.conformance.conftest import refused
from tests.conformance.probing import arguments
from tests.conformance.roles import as_role, granting, name_of
from tests.databases import Copy
from tests.waiting import wait_for

import custody
from custody import Custody, Retention
from custody.errors import Conflict, InvalidArgument, NotFound
from custody.store import migrate
from custody.store.rights import OF_SEGMENTS, catalog
from custody.store.roles import ROLES, SECRET, entries, rights_of
from custody.verbs import upkeep
from custody.wire.verb import declared

pytestmark = [pytest.mark.core, pytest.mark.req("X13")]

OPERATOR = {"operator"}
LOOK = {"readonly", "operator"}
CONSUME = {"app", "worker", "operator"}
SEE = CONSUME | {"readonly"}
PRODUCE = CONSUME | {"producer"}
ALL = set(ROLES)
MAY = {
    "topics": ALL,
    "topic": ALL,
    "groups": ALL,
    "producer": ALL,
    "new_epoch": PRODUCE,
    "forget_producer": PRODUCE,
    "publish": PRODUCE,
    "publish_many": PRODUCE,
    "publish_delayed": PRODUCE,
    "cancel_delayed": PRODUCE,
    "receive_events": PRODUCE,
    "claim": CONSUME,
    "settle": CONSUME,
    "extend": CONSUME,
    "fetch": CONSUME,
    "commit": CONSUME,
    "group": SEE,
    "read": SEE,
    "delayed": SEE,
    "delayed_count": SEE,
    "next_due": SEE,
    "blocked_keys": SEE,
    "offset_map": SEE,
    "leases": SEE,
    "key_states": SEE,
    "stats": SEE,
    "trace": SEE,
    "in_flight": SEE,
    "handling_times": SEE,
    "dead": SEE,
    "segments": SEE,
    "kept_aside": SEE,
    "overview": SEE,
    "status": SEE,
    "workers": SEE,
    "all_groups": ALL,
    "pipelines": SEE,
    "server": LOOK,
    "journal": LOOK,
    "schedules": SEE,
    "schedule": SEE,
    "attend_schedules": CONSUME,
    "tick": SEE,  # only to find out that nothing is due, for one who may not publish
    "create_schedule": OPERATOR,
    "change_schedule": OPERATOR,
    "pause_schedule": OPERATOR,
    "resume_schedule": OPERATOR,
    "run_schedule": OPERATOR,
    "delete_schedule": OPERATOR,
    "rewind": OPERATOR,
    "release_key": OPERATOR,
    "delete_key_states": OPERATOR,
    "retry_now": OPERATOR,
    "skip": OPERATOR,
    "redrive": OPERATOR,
    "discard": OPERATOR,
    "replay": OPERATOR,
    "create_topic": OPERATOR,
    "delete_topic": OPERATOR,
    "change_topic": OPERATOR,
    "maintain": OPERATOR,
    "set_journal_retention": OPERATOR,
    "create_group": OPERATOR,
    "change_group": OPERATOR,
    "delete_group": OPERATOR,
    "pause": OPERATOR,
    "resume": OPERATOR,
    "create_api_key": OPERATOR,
    "api_keys": OPERATOR,
    "revoke_api_key": OPERATOR,
}
SPENT = {"delete_topic": {"name": "spare"}, "delete_group": {"group": "spare"}, "create_group": {"group": "made"}}
"""Arguments that leave what the others need."""


class Granted:
    """A database in which each role has its rights."""

    def __init__(self, copy: Copy, close: ExitStack) -> None:
        self.url, self._close, self._open = copy.url, close, {}
        self.owner = close.enter_context(copy.custody(worker="owner"))

    def __call__(self, role: str) -> Custody:
        if role not in self._open:
            self._open[role] = self._close.enter_context(custody.connect(as_role(self.url, role), worker=role))
        return self._open[role]

    def sql(self, role: str, statement: str) -> list[Any]:
        with psycopg.connect(as_role(self.url, role), autocommit=True) as connection:
            found = connection.execute(statement.encode())
            return found.fetchall() if found.description else []


@pytest.fixture(scope="module")
def granted(server_url: str, template: str) -> Iterator[Granted]:
    with closing(Copy(server_url, template)) as copy, granting(copy.url), ExitStack() as close:
        yield Granted(copy, close)


@pytest.fixture(scope="module")
def stocked(granted: Granted) -> Granted:
    granted.owner.init_producer("p")
    for role in ROLES:
        granted.owner.create_topic(f"orders-{role}")
        granted.owner.create_group(f"orders-{role}", "stock")
        granted.owner.create_topic(f"spare-{role}")
        granted.owner.create_group(f"orders-{role}", "spare")
        granted.owner.create_schedule(f"made-{role}", topic=f"orders-{role}", every="1h")
        granted.owner.pause_schedule(f"made-{role}")
    return granted


def test_the_table_knows_every_verb() -> None:
    assert declared(Custody).keys() <= MAY.keys()


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("verb", MAY)
def test_a_role_may_call_its_verbs_and_no_others(stocked: Granted, role: str, verb: str) -> None:
    own = {"orders": f"orders-{role}", "spare": f"spare-{role}", "made": f"made-{role}"}
    wanted = arguments(verb) | SPENT.get(verb, {})
    given = {name: own.get(value, value) if isinstance(value, str) else value for name, value in wanted.items()}
    call = partial(getattr(stocked(role), verb), **given)
    if role in MAY[verb]:
        # such as a lease that does not exist: the rights were enough to find that out
        with suppress(NotFound, Conflict, InvalidArgument):
            call()
    else:
        with refused("permission_denied") as found:
            call()
        assert "`custody grants`" in found[0].remedy


@pytest.mark.parametrize("role", ["producer", "app", "worker"])
def test_a_role_does_not_get_further_by_statements(granted: Granted, role: str) -> None:
    for statement in (
        "SELECT * FROM custody.api_keys",
        "UPDATE custody.journal SET worker = 'nobody'",
        "DELETE FROM custody.journal",
        "DELETE FROM custody.log",
        "UPDATE custody.topics SET max_depth = 1",
        "INSERT INTO custody.granted VALUES ('me', 'operator')",
        "SELECT custody.open_segment(1, now())",
        "CREATE TABLE custody.mine ()",
    ):
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            granted.sql(role, statement)


def test_a_reader_changes_nothing_and_reads_no_keys() -> None:
    rights = rights_of("readonly")
    assert rights.reads_only
    assert not SECRET & rights.relations.keys()
    assert not catalog().definers & rights.functions


def test_an_operator_may_call_every_function() -> None:
    """Every other function belongs to one that runs as the owner; and no function is without a caller."""
    owners = catalog().definers | {"make_append", "make_reads", "grant_as"}
    below = {name for one in owners for name in catalog()._calls(catalog().texts[one])}
    left = (
        catalog().texts.keys() - catalog().views - rights_of("operator").functions - owners - below - OF_SEGMENTS.keys()
    )
    assert left - {name for one in below for name in catalog().needed([one]).functions} == set()


def test_rights_grow_from_role_to_role() -> None:
    order = ("producer", "app", "worker", "operator")
    for less, more in pairwise(order):
        assert rights_of(less).functions < rights_of(more).functions
    assert {"append", "publish"} <= entries()["produce"]
    assert {"claim", "settle"} <= entries()["consume"]


def test_a_segment_that_upkeep_opens_has_the_grants_of_the_log(granted: Granted) -> None:
    operator = granted("operator")
    operator.create_topic("sealed", retention=Retention(time="1d", segment_size="1kB"))
    operator.create_group("sealed", "g")
    for _ in range(3):
        granted("producer").publish_many("sealed", ["x" * 2000] * 40)
        assert [one.did for one in operator.maintain("sealed")][:1] == ["sealed"]
    assert len(granted("readonly").segments("sealed")) == 4
    lease = granted("app").claim("sealed", "g", max_messages=120)
    assert len(lease) == 120
    assert lease.ack().settled == 120
    assert granted("producer").publish_many("sealed", [b"y"] * 2001)[0].offset == 120, "by COPY"


def test_a_worker_leaves_upkeep_to_operators_and_goes_on(granted: Granted, caplog: pytest.LogCaptureFixture) -> None:
    granted.owner.create_topic("worked", retention=Retention(time="1d"))
    granted.owner.create_group("worked", "g")
    worker, seen = granted("worker"), []
    with caplog.at_level(logging.WARNING):
        upkeep.keep_up(partial(worker.maintain, "worked"), threading.Event(), every=0.001)  # it ends by itself
    assert "run `custody maintain --every 30s` as another" in caplog.text
    worker.publish("worked", 1)
    running = worker.worker_for("worked", "g", lambda message: seen.append(message.payload))
    thread = threading.Thread(target=running.run)
    thread.start()
    wait_for(lambda: seen == [1], "the message is handled")
    running.stop()
    thread.join()


def test_a_pipeline_stages_and_drops_its_own_tables(granted: Granted) -> None:
    assert granted.sql("worker", "SELECT custody.open_stage('staged_mine')") == [("staged_mine",)]
    row = "(1, 1, 0, 0, 0, 0, NULL, 'j', '1', NULL)"
    granted.sql("worker", f"INSERT INTO custody.staged_mine VALUES {row}")
    assert granted.sql("worker", "SELECT count(*) FROM custody.staged_mine") == [(1,)]
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        granted.sql("app", "SELECT * FROM custody.staged_mine")
    assert granted.sql("worker", "SELECT custody.drop_stage('staged_mine')") == [(True,)]


def test_an_application_writes_into_the_outbox_and_a_relay_takes_it(granted: Granted) -> None:
    with psycopg.connect(as_role(granted.url, "producer")) as mine:
        custody.outbox.write(mine, event_type="e", payload=1, destination="test:")
    published: list[Any] = []
    publishers = {"test": lambda event: published.append(event.payload)}
    assert custody.relay.Relay(as_role(granted.url, "worker"), publishers).drain("20s").published == 1
    with custody.outbox.Outbox(as_role(granted.url, "operator")) as outbox:
        assert outbox.prune("0s", states=["PUBLISHED"]) == 1
    assert published == [1]


def test_a_migration_gives_the_rights_again(granted: Granted) -> None:
    before = rights(granted)
    with psycopg.connect(granted.url, autocommit=True) as connection:
        connection.execute("UPDATE custody.release SET digest = 'another'")
    migrate.migrate(granted.url)
    assert rights(granted) == before
    granted("producer").publish("sealed", 1)


def rights(granted: Granted) -> Any:
    with psycopg.connect(granted.url, autocommit=True) as connection:
        return connection.execute(
            "SELECT what, a.grantee::regrole::text, a.privilege_type FROM ("
            "SELECT oid::regclass::text, relacl FROM pg_class WHERE relnamespace = 'custody'::regnamespace "
            "UNION ALL SELECT oid::regprocedure::text, proacl FROM pg_proc "
            "WHERE pronamespace = 'custody'::regnamespace AND proname !~ '^(append|slices|keys)_[0-9]'"
            ") x (what, acl), aclexplode(acl) a ORDER BY 1, 2, 3"
        ).fetchall()


def test_a_second_run_changes_nothing_and_another_role_takes_what_is_too_much(granted: Granted) -> None:
    before = rights(granted)
    granted.owner.grants("app", to=name_of("app"))
    assert rights(granted) == before
    granted.owner.grants("operator", to=name_of("app"))
    assert granted("app").pause("sealed", "g")
    granted.owner.grants("app", to=name_of("app"))
    with refused("permission_denied"):
        granted("app").resume("sealed", "g")
    assert rights(granted) == before


def test_only_the_owner_gives_rights(granted: Granted) -> None:
    with refused("permission_denied") as found:
        granted("operator").grants("operator", to=name_of("app"))
    assert "as its owner" in found[0].remedy
    with refused("invalid_argument") as found:
        granted.owner.grants("app", to="nobody-knows-it")
    assert 'CREATE ROLE "nobody-knows-it"' in found[0].remedy
