"""One suite, several ways: every test here runs on the direct connection, through a server, on either with asyncio, and
with roles of the database that have the least rights, with one expectation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import pytest
from tests.conformance.on_a_loop import on_a_loop
from tests.conformance.roles import ByRight, as_role, granting
from tests.conftest import Clock
from tests.databases import Copy, Kept
from tests.http.conftest import served

import custody
from custody.errors import CustodyError

BLOCKING = ("direct", "http")
# two ways are marked, because the suite takes as long again with each
ROLES, AIO_HTTP = (pytest.param(way, marks=pytest.mark.chaos) for way in ("roles", "aio http"))
TRANSPORTS = (*BLOCKING, "aio", AIO_HTTP, ROLES)
blocking = pytest.mark.parametrize("transport", [*BLOCKING, ROLES], indirect=True)
"""For tests of what the façade for asyncio has not."""


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def database(request: pytest.FixtureRequest, transport: str) -> Iterator[Kept | Copy]:
    kept: Kept = request.getfixturevalue("granted_database" if transport == "roles" else "kept_database")
    yield kept
    kept.recycle()


@pytest.fixture(scope="session")
def granted_database(server_url: str, template: str) -> Iterator[Kept]:
    """The database of tests with roles: each of ROLES has its grants, in all of its copies too."""
    with (
        closing(Copy(server_url, template)) as copy,
        granting(copy.url),
        closing(Kept(server_url, copy.name)) as made,
    ):
        yield made


@pytest.fixture
def direct(database: Kept | Copy, clock: Clock) -> Iterator[custody.Custody]:
    """The direct connection, which the server has too: its clock is the test's."""
    with database.custody(worker="test", clock=clock) as opened:
        yield opened


@pytest.fixture
def c(transport: str, database: Kept | Copy, direct: custody.Custody, clock: Clock) -> Iterator[custody.Custody]:
    """Custody, by each way."""
    if transport == "direct":
        yield direct
        return
    if transport == "aio":
        with on_a_loop(database.url, worker="test", clock=clock) as opened:
            yield opened
        return
    if transport == "aio http":
        with served(direct) as server, on_a_loop(server.url, worker="test") as opened:
            yield opened
        return
    if transport == "roles":
        with (
            custody.connect(as_role(database.url, "app"), worker="test", clock=clock) as app,
            custody.connect(as_role(database.url, "operator"), worker="test", clock=clock) as operator,
        ):
            yield ByRight(app, operator)  # type: ignore[misc]  # what has its verbs
        return
    with served(direct) as server, custody.connect(server.url, worker="test") as opened:
        yield opened


@contextmanager
def refused(code: str) -> Iterator[list[CustodyError]]:
    """The block is refused with this code: by the same class, whatever the way."""
    found: list[CustodyError] = []
    with pytest.raises(CustodyError) as caught:
        yield found
    assert caught.value.code == code, caught.value
    found.append(caught.value)


@pytest.fixture
def orders(c: custody.Custody) -> custody.Custody:
    """A topic `orders` with one partition and a group `stock` that is ordered by key."""
    c.create_topic("orders")
    c.create_group("orders", "stock", custody.Policy(ordering="key", max_attempts=2, backoff=custody.Constant("10s")))
    return c


Fill = Callable[..., list[custody.Receipt]]


@pytest.fixture
def fill(c: custody.Custody) -> Fill:
    """Publishes so many messages to a topic, with keys k0, k1 … in turn."""

    def publish(count: int, topic: str = "orders", keys: int = 3) -> list[custody.Receipt]:
        return c.publish_many(topic, [custody.Outgoing({"n": n}, key=f"k{n % keys}") for n in range(count)])

    return publish


@pytest.fixture(scope="module", params=["direct", "http"])
def tried(request: pytest.FixtureRequest, server_url: str, template: str) -> Iterator[custody.Custody]:
    """Custody, by either way, with one database for all the calls that a file tries: few of them change anything."""
    with closing(Copy(server_url, template)) as copy, copy.custody(worker="test") as direct:
        direct.create_topic("orders")
        direct.create_group("orders", "stock")
        direct.init_producer("p")
        direct.publish("orders", 1)
        if request.param == "direct":
            yield direct
        else:
            with served(direct) as server, custody.connect(server.url, worker="test") as remote:
                yield remote
