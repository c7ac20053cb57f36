"""A client behind a proxy that loses requests and answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from tests.http.conftest import Http, process, served
from tests.remote.cutting import Proxy

import custody

__all__ = ["process"]  # a fixture that is used here too


@pytest.fixture
def server(c: custody.Custody) -> Iterator[Http]:
    with served(c) as running:
        yield running


@pytest.fixture
def proxy(server: Http) -> Iterator[Proxy]:
    passing = Proxy(server.url)
    yield passing
    passing.close()


@pytest.fixture
def remote(proxy: Proxy) -> Iterator[custody.Custody]:
    """Custody through the proxy."""
    with custody.connect(proxy.url, worker="test", retry_for="20s") as opened:
        yield opened


@pytest.fixture
def orders(c: custody.Custody) -> Callable[[int], None]:
    """Topic `orders`, group `stock`, and so many messages."""
    c.create_topic("orders")
    c.create_group("orders", "stock", custody.Policy(ordering="key", backoff=custody.Constant("10s")))

    def fill(count: int) -> None:
        c.publish_many("orders", [custody.Outgoing(n, key=f"k{n}") for n in range(count)])

    return fill
