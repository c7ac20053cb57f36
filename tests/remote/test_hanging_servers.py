"""A server that hangs costs a part of the time, not all of it, where another one can be asked."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from contextlib import closing

import pytest
from tests.http.conftest import served
from tests.remote.cutting import Proxy
from tests.waiting import wait_for

import custody
from custody import Message, Receipt
from custody.cli.serve import serve
from custody.errors import DatabaseUnavailable
from custody.model.policy import seconds
from custody.remote import settling, transport

pytestmark = pytest.mark.core

Fill = Callable[[int], None]


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """What can be sent again is sent again after a moment."""
    monkeypatch.setattr(transport, "ATTEMPT", 0.2)
    monkeypatch.setattr(settling, "SHORTEST", 0.2)


def test_a_server_says_that_it_is_busy_before_its_clients_give_up() -> None:
    usual = inspect.signature(serve).parameters["statement_timeout"].default
    assert seconds(usual) + 10 <= transport.ANSWER


@pytest.mark.req("G11", "C8")
@pytest.mark.usefixtures("hasty")
def test_what_can_be_sent_again_does_not_wait_for_a_server_that_hangs(
    c: custody.Custody, remote: custody.Custody, proxy: Proxy, orders: Fill
) -> None:
    orders(1)
    held = [proxy.hold("GET /topics"), proxy.hold("POST /messages"), proxy.hold("GET /messages/orders")]
    assert remote.topic("orders").message_count == 1
    assert remote.publish("orders", 1) == Receipt("orders", 0, 1)
    lease = remote.claim("orders", "stock", max_messages=2)
    held.append(proxy.hold("POST /messages/ack"))
    assert lease.ack().settled == 2
    for one in held:
        one.set()
    assert (proxy.waiting, c.topic("orders").message_count) == (0, 2)


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("retry_for", ["0s", "500ms"])
def test_the_last_answer_is_waited_for(proxy: Proxy, orders: Fill, retry_for: str) -> None:
    """What takes a server long is not cut short each time."""
    orders(1)
    with custody.connect(proxy.url, retry_for=retry_for) as remote:
        held = [proxy.hold("GET /topics"), proxy.hold("GET /topics")]
        threading.Timer(1.5, lambda: [one.set() for one in held]).start()
        assert remote.topic("orders").message_count == 1
        proxy.clear()


@pytest.mark.usefixtures("hasty")
def test_what_is_sent_once_is_waited_for(remote: custody.Custody, proxy: Proxy, orders: Fill) -> None:
    orders(1)
    held = proxy.hold("POST /topics/orders/groups/stock/pause")
    threading.Timer(1.0, held.set).start()
    assert remote.pause("orders", "stock")


@pytest.mark.usefixtures("hasty")
def test_it_ends_all_the_same(c: custody.Custody, proxy: Proxy, orders: Fill, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "ANSWER", 0.3)
    orders(1)
    with custody.connect(proxy.url, retry_for="500ms") as remote:
        for _ in range(10):
            proxy.hold("POST /messages")
        with pytest.raises(DatabaseUnavailable, match="unknown"):
            remote.publish("orders", 2)
        assert 2 <= proxy.count("POST /messages") <= 4
        proxy.clear()
    assert c.topic("orders").message_count == 1


@pytest.mark.chaos
@pytest.mark.req("G14")
def test_a_worker_keeps_its_leases_although_a_server_hangs(database_url: str) -> None:
    """By the real clock: a lease that is not extended in time expires."""
    extend = "POST /messages/extend-visibility"
    with custody.connect(database_url) as c, served(c) as server, closing(Proxy(server.url)) as proxy:
        c.create_topic("orders")
        c.create_group("orders", "stock")
        c.publish("orders", 1)
        proxy.hold(extend)

        def handle(_: Message) -> None:
            wait_for(lambda: proxy.count(extend) > 3, "the lease is extended again and again")

        with custody.connect(proxy.url) as remote:
            worker = remote.worker_for("orders", "stock", handle, visibility_timeout="3s")
            working = threading.Thread(target=worker.run)
            working.start()
            wait_for(lambda: c.stats("orders", "stock").depth == 0, "it is handled", timeout=30)
            worker.stop()
            working.join(30)
        kinds = [entry.kind for entry in c.trace("orders", 0, 0)]
    assert [kind for kind in kinds if kind != "extend"] == ["claim", "ack"]
