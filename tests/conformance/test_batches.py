"""Messages that share a row of the log come one by one, whoever asks: each with its own key, payload and headers."""

from __future__ import annotations

import pytest
from tests.integration.test_batches import content, expected, some

from custody import Custody, Policy

pytestmark = pytest.mark.core


def test_what_was_published_together_comes_as_it_was(c: Custody) -> None:
    sent = some(100)
    c.create_topic("orders")
    c.create_group("orders", "stock", Policy(max_attempts=1))
    c.publish_many("orders", sent[:70])
    c.publish_many("orders", sent[70:])
    assert content(c.read("orders", max_messages=200)) == expected(sent)
    assert content(c.read("orders", offset=33, max_messages=50)) == expected(sent)[33:83]
    lease = c.claim("orders", "stock", max_messages=90)
    assert content(list(lease)) == expected(sent)[:90]
    lease.nack([m for m in lease if m.offset % 9 == 0], error="no")
    lease.ack()
    assert content([*c.dead("orders", "stock")]) == [one for one in expected(sent)[:90] if one[0] % 9 == 0]
    assert content(list(c.claim("orders", "stock", max_messages=90))) == expected(sent)[90:]
