"""Answers that do not tell what became of a call: of something in between, or of a server that broke."""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext

import pytest
from tests.remote.cutting import Proxy
from tests.waiting import wait_for

import custody
from custody import Receipt
from custody.errors import CustodyError, DatabaseUnavailable
from custody.remote.own_producers import OwnProducers
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


NOT_PASSED_ON = [404, 421, 425, 429]


@pytest.mark.parametrize("status", NOT_PASSED_ON)
def test_what_something_in_between_did_not_pass_on_is_sent_again(
    c: custody.Custody, remote: custody.Custody, proxy: Proxy, status: int
) -> None:
    """Also what is sent only once: it has not arrived."""
    c.create_topic("orders")
    c.create_group("orders", "g")
    for what, call in (
        ("POST /messages", lambda: remote.publish("orders", 1)),
        ("GET /messages", lambda: remote.claim("orders", "g")),
        ("POST /topics/orders/groups/g/pause", lambda: remote.pause("orders", "g")),
    ):
        proxy.answer(what, status, PAGE, times=2)
        call()
        assert (proxy.waiting, proxy.count(what)) == (0, 3)
    assert c.topic("orders").message_count == 1


@pytest.mark.parametrize("status", NOT_PASSED_ON)
def test_a_server_that_stays_away_behind_something_else_is_unavailable_and_nothing_is_unknown(
    c: custody.Custody, proxy: Proxy, status: int
) -> None:
    c.create_topic("orders")
    with custody.connect(proxy.url, retry_for="100ms") as remote:
        proxy.answer("POST /messages", status, PAGE, times=1000)
        with pytest.raises(DatabaseUnavailable, match=f"answered {status}") as refused:
            remote.publish("orders", 1)
        proxy.clear()
    assert "unknown" not in str(refused.value)


def test_the_pause_that_is_asked_for_is_kept(c: custody.Custody, remote: custody.Custody, proxy: Proxy) -> None:
    c.create_topic("orders")
    began = time.monotonic()
    proxy.answer("GET /topics", 429, PAGE, headers={"Retry-After": "1"})
    proxy.answer("GET /topics", 429, PAGE, headers={"Retry-After": "soon"})
    assert remote.topic("orders") == c.topic("orders")
    assert time.monotonic() - began >= 1
    proxy.answer("GET /topics", 429, PAGE, headers={"Retry-After": "3600"})
    with pytest.raises(DatabaseUnavailable, match="answered 429"):
        remote.topic("orders")
    assert time.monotonic() - began < 15


@pytest.mark.req("G14")
@pytest.mark.parametrize("status", NOT_PASSED_ON)
def test_a_worker_goes_on_when_it_is_passed_on_again(
    c: custody.Custody, remote: custody.Custody, proxy: Proxy, status: int
) -> None:
    c.create_topic("orders")
    c.create_group("orders", "g")
    c.publish("orders", 1)
    worker = remote.worker_for("orders", "g", lambda _: None, poll="50ms")
    proxy.answer("GET /messages/orders", status, PAGE, times=2)
    proxy.answer("POST /messages/ack", status, PAGE, times=2)
    working = threading.Thread(target=worker.run)
    working.start()
    wait_for(lambda: c.stats("orders", "g").depth == 0 or not working.is_alive(), "it is handled")
    worker.stop()
    working.join(20)
    assert [entry.kind for entry in c.trace("orders", 0, 0)] == ["claim", "ack"]


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
