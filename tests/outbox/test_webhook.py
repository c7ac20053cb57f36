"""Events as HTTP requests."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import psycopg
import pytest
from tests.outbox.web_service import Service

import custody
from custody.errors import InvalidArgument, PublisherUnavailable, PublishFailed, PublishRefused
from custody.outbox.events import shown
from custody.relay import CustodyPublisher, Relay, WebhookPublisher, signature
from custody.testing.publishers import event

pytestmark = pytest.mark.req("O9")


def test_a_webhook_is_a_request_with_a_signature(service: Service) -> None:
    publisher = WebhookPublisher(
        service.url, method="PUT", headers={"Authorization": "Bearer x"}, secret="s3cret", clock=lambda: 1_900_000_000.5
    )
    sent = event("billing:", {"n": 1}, headers={"x-a": "ä"}, ordering_key="k", attempts=2)
    publisher.publish(sent)
    (request,) = service.requests
    method, path, headers, body = request
    assert (method, path, body) == ("PUT", "/hook?a=1", b'{"n":1}')
    assert headers["Content-Type"] == "application/json"
    assert headers["Authorization"] == "Bearer x"
    assert headers["x-a"].encode("latin-1").decode() == "ä"
    assert (headers["X-Custody-Event-Type"], headers["X-Custody-Key"]) == ("tested", "k")
    assert headers["X-Custody-Attempt"] == "3"
    assert headers["X-Custody-Timestamp"] == "1900000000"
    event_id = headers["X-Custody-Event-Id"]
    assert headers["X-Custody-Signature"] == signature(b"s3cret", event_id, "1900000000", body)
    assert headers["X-Custody-Signature"].startswith("v1=")
    for other in ((b"other", event_id, "1900000000", body), (b"s3cret", "another", "1900000000", body)):
        assert headers["X-Custody-Signature"] != signature(*other), "not all that counts is signed"


@pytest.mark.parametrize(
    ("status", "error"),
    [(200, None), (201, None), (302, PublishRefused), (400, PublishRefused), (404, PublishRefused),
     (409, PublishFailed), (429, PublisherUnavailable), (500, PublishFailed), (503, PublisherUnavailable)],
)  # fmt: skip
def test_what_an_answer_means(service: Service, status: int, error: type[Exception] | None) -> None:
    service.default = status
    publisher = WebhookPublisher()
    sent = event(service.url, 1)
    if error is None:
        publisher.publish(sent)
    else:
        with pytest.raises(error, match=str(status)) as raised:
            publisher.publish(sent)
        assert getattr(raised.value, "busy", False) == (status == 429)
    WebhookPublisher(success=lambda found, _: found == status).publish(sent)


@contextmanager
def answering(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """The URL of a service that treats its one connection as it likes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                with suppress(OSError):  # the other side may have gone
                    answer(connection)

        thread = threading.Thread(target=accept)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
        thread.join()


def test_a_service_that_hangs_up_is_a_failure_and_not_an_outage() -> None:
    """Else one event that breaks the service would hold all others for ever."""
    with answering(lambda _: None) as url, pytest.raises(PublishFailed):
        WebhookPublisher(url, timeout="5s").publish(event("x:", 1))


def test_the_timeout_is_for_the_whole_request() -> None:
    """A service that sends a byte now and then is too slow, too."""
    ended = threading.Event()

    def drip(connection: socket.socket) -> None:
        for byte in b"HTTP/1.1 200 OK\r\n" * 10:
            connection.sendall(bytes([byte]))
            if ended.wait(0.1):
                return

    with answering(drip) as url:
        began = time.monotonic()
        with pytest.raises(PublishFailed, match="Timeout") as failed:
            WebhookPublisher(url, timeout="500ms").publish(event("x:", 1))
        assert time.monotonic() - began < 5
        ended.set()
    assert isinstance(failed.value.__cause__, TimeoutError)


@pytest.mark.parametrize(("status", "error"), [(200, None), (404, PublishRefused)])
def test_the_status_decides_however_slow_the_body_is(status: int, error: type[Exception] | None) -> None:
    ended = threading.Event()

    def stall(connection: socket.socket) -> None:
        connection.sendall(f"HTTP/1.1 {status} So\r\nContent-Length: 10\r\n\r\n".encode())
        ended.wait(20)

    with answering(stall) as url:
        publisher = WebhookPublisher(url, timeout="500ms")
        if error is None:
            publisher.publish(event("x:", 1))
        else:
            with pytest.raises(error, match=str(status)):
                publisher.publish(event("x:", 1))
        ended.set()


def test_headers_are_merged_by_names_in_any_case(service: Service) -> None:
    """What the publisher says counts more than what an event says, and nobody else speaks for Custody."""
    publisher = WebhookPublisher(service.url, headers={"Authorization": "Bearer relay"})
    given = {
        "content-type": "application/cloudevents+json",
        "authorization": "Bearer writer",
        "x-custody-event-id": "forged",
        "X-CUSTODY-SIGNATURE": "forged",
        "content-length": "0",
        "Transfer-Encoding": "chunked",
        "host": "elsewhere",
        "x-own": "1",
    }
    sent = event("x:", {"n": 1}, headers=given)
    publisher.publish(sent)
    ((_, _, _, body),) = service.requests
    assert body == b'{"n":1}'
    found = {name.lower(): value for name, value in service.lines[0]}
    assert len(found) == len(service.lines[0]), "a header came twice"
    assert found["content-type"] == "application/cloudevents+json"
    assert (found["authorization"], found["x-own"]) == ("Bearer relay", "1")
    assert found["x-custody-event-id"] == str(sent.event_id)
    assert found["host"].startswith("127.0.0.1:")
    assert "x-custody-signature" not in found
    assert "transfer-encoding" not in found


def test_user_and_password_of_a_url_are_sent(service: Service) -> None:
    url = service.url.replace("://", "://ann:p%40ss@")
    WebhookPublisher().publish(event(url, 1, headers={"authorization": "Bearer writer"}))
    WebhookPublisher(url, headers={"authorization": "Bearer own"}).publish(event("x:", 1))
    found = [{name.lower(): value for name, value in lines}["authorization"] for lines in service.lines]
    assert found == ["Basic YW5uOnBAc3M=", "Bearer own"]


@pytest.mark.parametrize(
    ("destination", "expected"),
    [
        ("", ""),
        ("billing:invoices", "billing:invoices"),
        ("https://ann:secret@example.org/hook?token=secret#secret", "https://example.org/hook"),
        ("custody+https://secret@example.org#orders", "custody+https://example.org#orders"),
        ("custody+postgresql://u:secret@h:5432/d?password=secret#orders", "custody+postgresql://h:5432/d#orders"),
    ],
)
@pytest.mark.req("O12")
def test_what_is_shown_of_a_destination_is_no_secret(destination: str, expected: str) -> None:
    assert shown(destination) == expected
    with pytest.raises(InvalidArgument) as refused:
        CustodyPublisher().publish(event(destination.replace("#orders", ""), 1))
    assert "secret" not in str(refused.value)
    with pytest.raises(InvalidArgument) as refused:
        WebhookPublisher(destination.replace("https://ann:", "ftp://ann:") or "x:")
    assert "secret" not in str(refused.value)


@pytest.mark.req("O12")
def test_a_relay_logs_no_secret_of_a_destination(alone_url: str, caplog: pytest.LogCaptureFixture) -> None:
    with psycopg.connect(alone_url) as connection:
        for destination in ("https://ann:s3cret@127.0.0.1:1/?token=s3cret", "other://s3cret@host/"):
            custody.outbox.write(connection, event_type="e", payload=1, destination=destination)
    Relay(alone_url).drain("1s")
    assert "https://127.0.0.1:1/ is down" in caplog.text
    assert "1 events wait for other://host/" in caplog.text
    assert "s3cret" not in caplog.text


def test_no_url_is_refused_at_once() -> None:
    with pytest.raises(InvalidArgument, match="http"):
        WebhookPublisher("ftp://example.org")
