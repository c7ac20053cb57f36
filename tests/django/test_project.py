"""Publishing, handling and commands in the project of docs/django.md, on a real PostgreSQL."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict
from tests.django.conftest import variables_of
from tests.waiting import wait_for

import custody
from custody.errors import InvalidArgument, InvalidConfig, InvalidPayload, TopicNotFound

pytestmark = pytest.mark.req("X12")


@pytest.fixture
def orders(shop: custody.Custody) -> custody.Custody:
    shop.create_topic("orders")
    shop.create_topic("looks")
    shop.create_group("orders", "parcels", custody.Policy(ordering="key"))
    return shop


@contextmanager
def rolled_back() -> Iterator[None]:
    """A transaction or a savepoint of Django that ends with an error."""
    from django.db import transaction

    with suppress(ZeroDivisionError), transaction.atomic():
        yield
        raise ZeroDivisionError


def payloads(c: custody.Custody, topic: str = "orders") -> list[Any]:
    return [message.payload for message in c.read(topic)]


def call(*arguments: str) -> str:
    from django.core.management import call_command

    out = io.StringIO()
    call_command("custody", *arguments, stdout=out)
    return out.getvalue()


# publish


def test_an_event_is_written_in_the_transaction(orders: custody.Custody) -> None:
    from shop import models
    from shop.orders import place

    place("SKU-1")
    with rolled_back():
        place("SKU-2")
    order = models.Order.objects.get()
    (message,) = orders.claim("orders", "parcels", max_messages=10)
    assert (message.payload, message.key) == ({"id": order.pk, "sku": "SKU-1"}, "SKU-1")
    with pytest.raises(InvalidArgument, match="autocommit"):
        place.__wrapped__("SKU-3")


def test_a_message_is_published_after_the_commit(orders: custody.Custody) -> None:
    from django.db import transaction
    from shop import models
    from shop.orders import announce, look_at

    order = models.Order(sku="SKU-1")
    with transaction.atomic():
        look_at(order)
        assert payloads(orders, "looks") == []
    assert payloads(orders, "looks") == [{"id": order.pk}]
    with rolled_back():
        look_at(order)
        announce("this one is not part of the transaction")
    with transaction.atomic(), rolled_back():  # a savepoint
        look_at(order)
    assert payloads(orders, "looks")[1:] == [{"text": "this one is not part of the transaction"}]


def test_what_is_published_is_that_of_the_call(orders: custody.Custody) -> None:
    from django.db import transaction

    from custody.django import publish_on_commit

    given: list[Any] = [{"n": 1}, "text", b"\x00\xff", None, [1.5]]
    headers = {"a": "1"}
    with transaction.atomic():
        for payload in given:
            publish_on_commit("orders", payload, headers=headers, key="k")
        given[0]["n"] = 2
        headers["a"] = "2"
    found = orders.read("orders")
    assert [message.payload for message in found] == [{"n": 1}, *given[1:]]
    assert {message.headers["a"] for message in found} == {"1"}
    with transaction.atomic():
        with pytest.raises(InvalidPayload):
            publish_on_commit("orders", {1, 2})
        with pytest.raises(InvalidPayload):
            publish_on_commit("orders", 1, key="a\0b")
    publish_on_commit("orders", "at once")
    assert payloads(orders)[-1] == "at once"


def test_a_publish_that_fails_after_the_commit_is_raised_or_logged(
    orders: custody.Custody, caplog: pytest.LogCaptureFixture
) -> None:
    from django.db import transaction
    from shop import models

    from custody.django import publish_on_commit

    @transaction.atomic
    def order() -> None:
        models.Order.objects.create(sku="SKU-1")
        publish_on_commit("missing", 1)
        publish_on_commit("orders", "never")

    with pytest.raises(TopicNotFound):
        order()
    assert models.Order.objects.count() == 1
    with transaction.atomic():
        publish_on_commit("missing", 1, robust=True)
        publish_on_commit("orders", "next")
    assert payloads(orders) == ["next"]
    assert "Error calling publish_on_commit" in caplog.text
    assert "there is no topic 'missing'" in caplog.text


# handle


def test_a_handler_writes_with_the_orm_once(orders: custody.Custody) -> None:
    """The worker of docs/django.md: the record and the row are one transaction; a repeat writes nothing."""
    from shop import models
    from shop.app import app

    for sku in ("SKU-1", "SKU-2"):
        orders.publish("orders", {"sku": sku}, key=sku)
    running = app.start(orders)
    thread = threading.Thread(target=running.run)
    thread.start()
    try:
        wait_for(lambda: orders.stats("orders", "parcels").depth == 0, "the parcels are packed")
        orders.rewind("orders", "parcels", to_offset=0)
        wait_for(lambda: orders.stats("orders", "parcels").depth == 0, "they are delivered again")
    finally:
        running.stop()
        thread.join()
    assert sorted(models.Parcel.objects.values_list("sku", flat=True)) == ["SKU-1", "SKU-2"]


def test_the_ack_is_part_of_the_transaction(orders: custody.Custody) -> None:
    from django.db import connection
    from shop import models
    from shop.packing import pack_all

    orders.publish("orders", {"sku": "SKU-1"})
    lease = orders.claim("orders", "parcels")
    with rolled_back():
        models.Parcel.objects.create(sku="SKU-1")
        lease.ack(connection=connection)
    assert (models.Parcel.objects.count(), orders.stats("orders", "parcels").in_flight) == (0, 1)
    lease.release()
    pack_all()
    assert (models.Parcel.objects.count(), orders.stats("orders", "parcels").depth) == (1, 0)


@pytest.mark.parametrize("kind", ["function", "coroutine"])
def test_a_handler_gets_a_new_connection_if_the_old_one_broke(orders: custody.Custody, kind: str) -> None:
    from asgiref.sync import sync_to_async
    from django.db import connection
    from shop import models

    backends = []

    def pack(message: custody.Message) -> None:
        models.Parcel.objects.create(sku=message.payload)
        backends.append(connection.connection.info.backend_pid)
        if message.payload == "breaks":
            connection.connection.close()  # as if the server had closed it
            connection.errors_occurred = True

    async def pack_later(message: custody.Message) -> None:
        await sync_to_async(pack)(message)

    orders.publish_many("orders", ["fine", "breaks", "after it"])
    worker = orders.worker_for("orders", "parcels", pack if kind == "function" else pack_later, concurrency=1)
    thread = threading.Thread(target=worker.run)
    thread.start()
    try:
        wait_for(lambda: orders.stats("orders", "parcels").depth == 0, "all are handled")
    finally:
        worker.stop()
        thread.join()
    assert (worker.summary.done, worker.summary.failed) == (3, 0)
    assert len(set(backends)) == 3, "CONN_MAX_AGE is 0: each message has a connection of its own"


# the client


def test_a_child_opens_its_own(orders: custody.Custody) -> None:
    from custody.django import client

    assert client() is orders
    pid = os.fork()
    if pid == 0:  # the child: nothing of pytest may run in it
        code = 1
        try:
            client().publish("orders", {"of": "the child"})
            code = 0 if client() is not orders else 2
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    client().publish("orders", {"of": "the parent"})
    assert payloads(orders) == [{"of": "the child"}, {"of": "the parent"}]


def test_it_follows_the_test_database(orders: custody.Custody, project_url: str) -> None:
    from django.test.utils import override_settings

    from custody.django import client

    with override_settings(CUSTODY={"DATABASE": project_url, "POOL_SIZE": 2, "STATEMENT_TIMEOUT": "5s"}):
        assert client() is not orders
        assert client().topic("orders")
    assert client() is not orders, "the first one was closed"


# the settings


@pytest.mark.parametrize(
    ("given", "refused", "hint"),
    [
        ({"DATABSE": "default"}, "no setting 'DATABSE'", "Did you mean 'DATABASE'?"),
        ({"DATABASE": "defualt"}, "neither an alias of DATABASES nor a URL", "Did you mean 'default'?"),
        ({"DATABASE": None}, r"CUSTODY\['DATABASE'\] is None", "Give a string."),
        ({"POOL_SIZE": 0}, "pool_size cannot be 0", "a whole number from 1"),
        ({"STATEMENT_TIMEOUT": "soon"}, "'soon' is not a duration", "Write a number with a unit"),
        ({"ALLOW_INSECURE": "no"}, "ALLOW_INSECURE", "True or False"),
        ("default", "CUSTODY is 'default'", "Give a dict"),
    ],
)
def test_wrong_settings_are_found_by_the_system_check(project: Path, given: Any, refused: str, hint: str) -> None:
    from django.core.checks import run_checks
    from django.test.utils import override_settings

    from custody.django import client

    with override_settings(CUSTODY=given):
        (found,) = [one for one in run_checks() if one.id.startswith("custody")]
        assert found.id == "custody.E001"
        assert re.search(refused, found.msg), found.msg
        assert hint in found.hint
        with pytest.raises((InvalidConfig, InvalidArgument), match=refused):
            client()


def test_another_database_than_postgresql_is_refused(project: Path) -> None:
    from django.db import connections
    from django.test.utils import override_settings

    from custody.django.checks import check_configuration

    sqlite = {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}
    connections.settings["lite"] = {**connections.settings["default"], **sqlite}
    try:
        with override_settings(CUSTODY={"DATABASE": "lite"}):
            (found,) = check_configuration()
    finally:
        del connections.settings["lite"]
    assert "DATABASES['lite'] is sqlite" in found.msg


def test_the_url_is_that_of_the_alias(project: Path) -> None:
    from django.db import connections

    from custody.django.configuration import url_of

    given = {
        "NAME": "a shop",
        "USER": "it's",
        "PASSWORD": "p@ss/w?rd%41&= #\u2603",
        "HOST": "/run/my pg",
        "PORT": 5433,
        "OPTIONS": {
            "sslmode": "disable",
            "application_name": "x",
            "pool": {"min_size": 2},
            "server_side_binding": True,
        },
    }
    connections.settings["other"] = {**connections.settings["default"], **given}
    try:
        found = conninfo_to_dict(url_of("other"))
    finally:
        del connections.settings["other"]
    assert found == {
        "dbname": "a shop",
        "user": "it's",
        "password": given["PASSWORD"],
        "host": "/run/my pg",
        "port": "5433",
        "sslmode": "disable",
        "application_name": "x",
    }


# manage.py


def test_the_schema_comes_by_a_command_and_a_check_says_if_it_is_missing(
    shop: custody.Custody, project_url: str
) -> None:
    from django.core.management import call_command

    def warnings() -> str:
        err = io.StringIO()
        call_command("check", databases=["default"], stderr=err, stdout=io.StringIO())
        return err.getvalue()

    assert "custody" not in warnings()
    with psycopg.connect(project_url, autocommit=True) as connection:
        connection.execute("UPDATE custody.release SET release = release + 1, digest = 'another'")
        assert "custody" not in warnings(), "a newer release that serves this one"
        connection.execute("UPDATE custody.release SET release = release - 1")
        found = warnings()
        assert "(custody.W001)" in found
        assert "manage.py custody migrate" in found
        connection.execute("DROP SCHEMA custody CASCADE")
    assert "has no Custody schema" in warnings()
    assert "the schema is at version" in call("migrate")
    assert "custody" not in warnings()
    call_command("makemigrations", check=True, stdout=io.StringIO())


def test_commands_run_on_the_database_of_the_settings(orders: custody.Custody) -> None:
    from django.core.management import CommandError

    orders.publish("orders", "x")
    before = dict(os.environ)
    assert "orders" in call("topics", "list")
    assert '"lag":1' in call("stats", "orders", "parcels", "--json").replace(" ", "")
    with pytest.raises(CommandError, match="ended with 1") as failed:
        call("stats", "missing")
    assert failed.value.returncode == 1
    assert dict(os.environ) == before


def test_manage_py_runs_a_worker_until_it_is_stopped(orders: custody.Custody, project: Path, project_url: str) -> None:
    """Processes, as a user starts them."""
    from django.db import connections
    from shop import models

    environment = {**os.environ, **variables_of(project_url)}
    manage = [sys.executable, "manage.py", "custody", "--settings", "mysite.settings"]
    worker = subprocess.Popen(
        [*manage, "work", "shop.app"], cwd=project, env=environment, stderr=subprocess.PIPE, text=True
    )
    try:
        orders.publish("orders", {"sku": "SKU-1"}, key="SKU-1")
        wait_for(lambda: models.Parcel.objects.count() == 1, "the parcel is packed")
        connections.close_all()
    finally:
        worker.terminate()
        _, said = worker.communicate(timeout=30)
    assert worker.returncode == 0, said
    assert "working on shop (orders/parcels)" in said
    wrong = subprocess.run(
        [*manage, "dead", "missing", "parcels"], cwd=project, env=environment, capture_output=True, text=True
    )
    assert (wrong.returncode, "Traceback" in wrong.stderr) == (1, False)
    assert "error: there is no topic" in wrong.stderr


# psycopg2

OLD_DRIVER = """
import sys
sys.modules["psycopg"] = None  # as for a backend on psycopg2: Django takes psycopg 3 if it is installed
import django.db.backends.postgresql.base, django.db.backends.postgresql.psycopg_any as driver
assert not driver.is_psycopg3
del sys.modules["psycopg"]
import django
django.setup()
from django.db import connection, transaction
from custody.django import client
from shop.orders import place
client().ensure_topic("orders")
client().ensure_group("orders", "parcels")
place("SKU-1")
(message,) = lease = client().claim("orders", "parcels")
assert message.payload["sku"] == "SKU-1"
try:
    with transaction.atomic():
        lease.ack(connection=connection)
except Exception as error:
    print(error)
"""


def test_the_outbox_on_a_backend_with_psycopg2(shop: custody.Custody, project: Path, project_url: str) -> None:
    environment = {**os.environ, **variables_of(project_url), "DJANGO_SETTINGS_MODULE": "mysite.settings"}
    run = subprocess.run(
        [sys.executable, "-c", OLD_DRIVER], cwd=project, env=environment, capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0, run.stderr
    assert "only the outbox takes a connection of psycopg2" in run.stdout
