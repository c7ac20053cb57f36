"""Answers that do not tell what became of a call: of something in between, or of a server that broke."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
from tests.remote.cutting import Proxy

import custody
from custody import Receipt
from custody.errors import CustodyError, DatabaseUnavailable
from custody.remote.producers import OwnProducers
from custody.remote.transport import Tries

pytestmark = pytest.mark.core

PAGE = b"<html>sorry</html>"
BROKEN = b'{"error": {"code": "custody_error", "message": "broken"}}'
STRANGE = [(200, PAGE), (200, b'{"receipts": 1}'), (408, PAGE), (499, PAGE), (500, PAGE), (500, BROKEN), (524, PAGE)]


@pytest.mark.req("G11", "C8")
@pytest.mark.parametrize(("status", "body"), STRANGE)
def test_a_publish_with_a_strange_answer_is_sent_again_and_the_next_one_is_not_swallowed(
    c: custody.Custody, remote: custody.Custody, proxy: Proxy, status: int, body: bytes
) -> None:
    c.create_topic("orders")
    remote.publish("orders", 0)
    proxy.answer("POST /messages", status, body, when="after")
    assert remote.publish("orders", 1) == Receipt("orders", 0, 1)
    assert remote.publish("orders", 2) == Receipt("orders", 0, 2)
    assert [message.payload for message in c.read("orders")] == [0, 1, 2]


@pytest.mark.req("G11", "C8")
@pytest.mark.parametrize(("status", "body"), STRANGE)
def test_a_strange_answer_at_the_end_is_called_unknown(
    c: custody.Custody, proxy: Proxy, status: int, body: bytes
) -> None:
    c.create_topic("orders")
    with custody.connect(proxy.url, retry_for=0) as remote:
        mine = remote.init_producer("mine")
        for publish in (remote.publish, mine.publish):
            publish("orders", 0)
            proxy.answer("POST /messages", status, body, when="after")
            with pytest.raises(DatabaseUnavailable, match="unknown"):
                publish("orders", 1)
            publish("orders", 2)
    assert [message.payload for message in c.read("orders")] == [0, 1, 2] * 2


@pytest.mark.parametrize(("status", "body"), [(200, PAGE), (500, BROKEN), (524, PAGE)])
def test_a_question_is_asked_again_after_an_error_page(
    c: custody.Custody, remote: custody.Custody, proxy: Proxy, status: int, body: bytes
) -> None:
    c.create_topic("orders")
    proxy.answer("GET /topics", status, body)
    assert remote.topic("orders") == c.topic("orders")


def test_a_plain_refusal_of_something_in_between_is_final(
    c: custody.Custody, remote: custody.Custody, proxy: Proxy
) -> None:
    c.create_topic("orders")
    proxy.answer("POST /messages", 403, PAGE)
    with pytest.raises(CustodyError, match="answered 403") as refused:
        remote.publish("orders", 1)
    assert (refused.value.code, proxy.count("POST /messages")) == ("custody_error", 1)


@pytest.mark.req("G11")
def test_a_producer_keeps_its_epoch_only_if_nothing_was_done() -> None:
    epochs = iter(range(1, 9))
    producers = OwnProducers(lambda _: next(epochs), lambda *_, **__: None)
    used: list[tuple[int, int]] = []

    def send(error: CustodyError | None) -> None:
        def attempt(_: str, epoch: int, sequence: int, __: Tries) -> None:
            used.append((epoch, sequence))
            if error is not None:
                raise error

        with nullcontext() if error is None else pytest.raises(type(error)):
            producers.publish(1, attempt)

    for error in (None, custody.errors.QueueFull(), None, CustodyError("broken"), None):
        send(error)
    assert used == [(1, 0), (1, 1), (1, 1), (1, 2), (2, 0)]
