"""Pages of a real server, and groups in every state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import urlencode

import pytest
from tests.http.conftest import Http, Response, http_, serve

import custody

__all__ = ["http_", "serve"]

Submit = Callable[..., Response]


def submit(http: Http, path: str, fields: Any = (), **headers: str) -> Response:
    """Sends a form as a browser does."""
    own = {"Origin": http.url, "Content-Type": "application/x-www-form-urlencoded"}
    return http("POST", path, urlencode(fields, doseq=True).encode(), headers={**own, **headers})


@pytest.fixture
def troubled(c: custody.Custody) -> custody.Custody:
    """orders with two groups: in billing keys are held by dead messages, in mail they wait for a retry."""
    c.create_topic("orders", partitions=1)
    c.create_group("orders", "billing", custody.Policy(ordering="key", max_attempts=1, on_dead="hold"))
    c.create_group("orders", "mail", custody.Policy(ordering="key", backoff=custody.Constant("1h")))
    for number in range(3):
        c.publish("orders", {"order": number}, key="A", headers={"shop": "north"})
        c.publish("orders", {"order": number}, key="B")
    for group in ("billing", "mail"):
        lease = c.claim("orders", group, max_messages=2)
        assert lease is not None
        for message in lease.messages:
            lease.nack(message, error=raised("no answer"))
        assert not c.claim("orders", group, max_messages=10), "the others are behind their keys"
    return c


def raised(text: str) -> TimeoutError:
    """An error with a traceback."""
    try:
        raise TimeoutError(text)
    except TimeoutError as error:
        return error
