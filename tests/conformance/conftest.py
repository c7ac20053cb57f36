"""One suite, two ways: every test here runs on the direct connection and through a server, with one expectation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import pytest
from tests.conftest import Clock
from tests.databases import Copy, Kept
from tests.http.conftest import served

import custody
from custody.errors import CustodyError

TRANSPORTS = ("direct", "http")


@pytest.fixture
def direct(database: Kept | Copy, clock: Clock) -> Iterator[custody.Custody]:
    """The direct connection, which the server has too: its clock is the test's."""
    with database.custody(worker="test", clock=clock) as opened:
        yield opened


@pytest.fixture(params=TRANSPORTS)
def c(request: pytest.FixtureRequest, direct: custody.Custody) -> Iterator[custody.Custody]:
    """Custody, by either way."""
    if request.param == "direct":
        yield direct
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
