"""Events as HTTP requests."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import psycopg
import pytest
from tests.outbox.web_service import Service

import custody
from custody.errors import InvalidArgument, PublisherUnavailable, PublishFailed, PublishRefused
from custody.outbox import Outbox
from custody.outbox.events import without_secrets
from custody.relay import CustodyPublisher, Relay, WebhookPublisher, signature
from custody.relay.addresses import Networks
from custody.testing.publishers import event

pytestmark = pytest.mark.req("O9")

LOOPBACK = ("127.0.0.0/8", "::1")
Webhook = partial(WebhookPublisher, allow_networks=LOOPBACK)
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"


def test_a_webhook_is_a_request_with_a_signature(service: Service) -> None:
    publisher = Webhook(
        service.url, method="PUT", headers={"Authorization": "Bearer x"}, secret=SECRET, clock=lambda: 1_900_000_000.5
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
    assert headers["webhook-timestamp"] == "1900000000"
    assert headers["webhook-id"] == headers["X-Custody-Event-Id"] == str(sent.event_id)
    assert headers["webhook-signature"] == signature(SECRET, str(sent.event_id), "1900000000", body)


def test_a_signature_is_that_of_standard_webhooks() -> None:
    """The example of its specification."""
    expected = "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
    body = b'{"test": 2432232314}'
    assert signature(SECRET, "msg_p5jXN8AQM9LWM0D4loKWxJek", "1614265330", body) == expected
    for other in (("msg_other", "1614265330", body), ("msg_p5jXN8AQM9LWM0D4loKWxJek", "1614265331", body),
                  ("msg_p5jXN8AQM9LWM0D4loKWxJek", "1614265330", b"{}")):  # fmt: skip
        assert signature(SECRET, *other) != expected, "not all that counts is signed"


def test_during_a_rotation_both_secrets_sign(service: Service) -> None:
    new = b"a new secret, as its bytes"
    sent = event("x:", 1)
    Webhook(service.url, secret=[new, SECRET], clock=lambda: 1.0).publish(sent)
    found = service.requests[0][2]["webhook-signature"].split(" ")
    assert found == [signature(secret, str(sent.event_id), "1", b"1") for secret in (new, SECRET)]


@pytest.mark.parametrize("secret", ["s3cret", "whsec_", "whsec_no base64!", b""])
def test_a_secret_in_another_form_is_refused(secret: str | bytes) -> None:
    with pytest.raises(InvalidArgument, match="whsec_"):
        Webhook(secret=secret)


@pytest.mark.parametrize(
    ("status", "error"),
    [(200, None), (201, None), (302, PublishFailed), (400, PublishFailed), (404, PublishFailed), (410, PublishRefused),
     (409, PublishFailed), (429, PublisherUnavailable), (500, PublishFailed), (503, PublisherUnavailable)],
)  # fmt: skip
def test_what_an_answer_means(service: Service, status: int, error: type[Exception] | None) -> None:
    service.default = status
    publisher = Webhook()
    sent = event(service.url, 1)
    if error is None:
        publisher.publish(sent)
    else:
        with pytest.raises(error, match=str(status)) as raised:
            publisher.publish(sent)
        assert getattr(raised.value, "busy", False) == (status == 429)
    Webhook(success=lambda found, _: found == status).publish(sent)
    if error is PublishFailed:
        with pytest.raises(PublishRefused):
            Webhook(refused=(status,)).publish(sent)


@pytest.mark.parametrize(
    ("given", "expected"),
    [("120", 120), ("0", 0), ("99999999999", 3600), ("Wed, 21 Oct 2015 07:28:30 GMT", 30),
     ("Wed, 21 Oct 2015 07:27:00 GMT", 0), ("Thu, 22 Oct 2015 07:28:00 GMT", 3600), ("soon", None), (None, None),
     ("Wed, 21 Oct 99999999999 07:28:00 GMT", None)],
)  # fmt: skip
@pytest.mark.parametrize("status", [429, 503, 500])
def test_an_answer_may_say_when_to_come_again(service: Service, status: int, given: str | None, expected: Any) -> None:
    service.default = status
    service.headers = {} if given is None else {"Retry-After": given}
    with pytest.raises((PublisherUnavailable, PublishFailed)) as raised:
        Webhook(service.url, clock=lambda: 1_445_412_480.0).publish(event("x:", 1))
    assert raised.value.retry_after == expected


@pytest.mark.parametrize(
    ("location", "shown_as"),
    [("https://ann:s3cret@example.org/new?token=s3cret", "https://example.org/new"), ("/new", "/new")],
)
def test_a_redirect_is_not_followed_and_the_error_says_where_to(service: Service, location: str, shown_as: str) -> None:
    service.default, service.headers = 308, {"Location": location}
    with pytest.raises(PublishFailed, match=f"308, a redirect to .*{shown_as}") as failed:
        Webhook(service.url).publish(event("x:", 1))
    assert "s3cret" not in str(failed.value)
    assert len(service.requests) == 1


@pytest.mark.parametrize(
    ("address", "public"),
    [("93.184.215.14", True), ("2606:2800:21f:cb07:6820:80da:af6b:8b2c", True), ("::ffff:93.184.215.14", True),
     ("127.0.0.1", False), ("127.8.9.1", False), ("10.1.2.3", False), ("172.16.0.1", False), ("192.168.1.1", False),
     ("169.254.169.254", False), ("100.64.0.1", False), ("0.0.0.0", False), ("224.0.0.1", False),
     ("255.255.255.255", False), ("::1", False), ("::", False), ("fe80::1%eth0", False), ("fd00::1", False),
     ("ff02::1", False), ("::ffff:127.0.0.1", False), ("::ffff:a9fe:a9fe", False), ("64:ff9b::a9fe:a9fe", False),
     ("2002:7f00:1::", False), ("64:ff9b::5db8:d70e", True), ("64:ff9b:1::7f00:1", False), ("fec0::1", False),
     ("::127.0.0.1", False), ("::ffff:0:127.0.0.1", False), ("3fff::1", False), ("5f00::1", False),
     ("192.0.0.8", False)],
)  # fmt: skip
def test_which_addresses_are_public(address: str, public: bool) -> None:
    assert Networks().permit(address) == public
    assert Networks(["0.0.0.0/0", "::/0"]).permit(address)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.1", "0x7f000001", "[::ffff:127.0.0.1]"])
def test_a_private_address_is_refused_after_its_name_was_resolved(service: Service, host: str) -> None:
    url = service.url.replace("127.0.0.1", host)
    with pytest.raises(PublishRefused, match="allow_networks"):
        WebhookPublisher().publish(event(url, 1))
    with pytest.raises(PublisherUnavailable, match="allow_networks"):
        WebhookPublisher(url).publish(event("x:", 1))
    with pytest.raises(PublishRefused, match="allow_networks"):
        CustodyPublisher().publish(event(f"custody+{url.partition('/hook')[0]}#orders", 1))
    with pytest.raises(PublishRefused, match="allow_networks"):
        CustodyPublisher().publish(event(f"custody+postgresql://{host}:{service.server.server_port}/d#orders", 1))
    assert service.requests == []
    WebhookPublisher(allow_networks=LOOPBACK).publish(event(url, 1))
    assert len(service.requests) == 1


def test_the_address_that_was_judged_is_the_one_that_is_connected_to(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that means a public address when it is looked at and a private one afterwards gets nowhere."""
    port = service.server.server_port
    private = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]
    public = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.1", port))]
    answers = [public, private, private]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answers.pop(0))
    publisher = WebhookPublisher(timeout="300ms", allow_networks=["192.0.2.0/24"])
    with pytest.raises((PublisherUnavailable, PublishRefused)):
        publisher.publish(event(f"http://rebound.example:{port}/", 1))
    with pytest.raises(PublishRefused):
        publisher.publish(event(f"http://rebound.example:{port}/", 1))
    assert service.requests == []


@pytest.mark.req("O12")
def test_a_service_that_says_when_to_come_again_is_left_alone_until_then(alone_url: str, service: Service) -> None:
    service.default, service.headers = 429, {"Retry-After": "120"}
    with psycopg.connect(alone_url) as connection:
        for n in range(3):
            custody.outbox.write(connection, event_type="e", payload=n, destination=service.url, ordering_key="k")
    outage_backoff = custody.Constant("0s")
    relay = Relay(alone_url, allow_networks=LOOPBACK, outage_backoff=outage_backoff)
    for _ in range(5):
        relay.run_once()
    assert len(service.requests) == 1
    relay.close()
    with Outbox(alone_url) as outbox:
        assert [event.attempts for event in outbox.events()] == [1, 0, 0]


@pytest.mark.req("O6", "O12")
def test_a_failure_waits_for_as_long_as_it_was_told_to(alone_url: str, service: Service) -> None:
    service.default, service.headers = 500, {"Retry-After": "1800"}
    with psycopg.connect(alone_url) as connection:
        sent = custody.outbox.write(connection, event_type="e", payload=1, destination=service.url)
    relay = Relay(alone_url, allow_networks=LOOPBACK)
    assert relay.run_once() == 1
    relay.close()
    with Outbox(alone_url) as outbox:
        found = outbox.event(sent)
    assert (found.status, found.attempts) == ("PENDING", 1)
    assert (found.available_at - found.updated_at).total_seconds() == pytest.approx(1800, abs=1)


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
        Webhook(url, timeout="5s").publish(event("x:", 1))


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
            Webhook(url, timeout="500ms").publish(event("x:", 1))
        assert time.monotonic() - began < 5
        ended.set()
    assert isinstance(failed.value.__cause__, TimeoutError)


@pytest.mark.parametrize(("status", "error"), [(200, None), (404, PublishFailed), (410, PublishRefused)])
def test_the_status_decides_however_slow_the_body_is(status: int, error: type[Exception] | None) -> None:
    ended = threading.Event()

    def stall(connection: socket.socket) -> None:
        connection.sendall(f"HTTP/1.1 {status} So\r\nContent-Length: 10\r\n\r\n".encode())
        ended.wait(20)

    with answering(stall) as url:
        publisher = Webhook(url, timeout="500ms")
        if error is None:
            publisher.publish(event("x:", 1))
        else:
            with pytest.raises(error, match=str(status)):
                publisher.publish(event("x:", 1))
        ended.set()


def test_headers_are_merged_by_names_in_any_case(service: Service) -> None:
    """What the publisher says counts more than what an event says, and nobody else speaks for Custody."""
    publisher = Webhook(service.url, headers={"Authorization": "Bearer relay"})
    given = {
        "content-type": "application/cloudevents+json",
        "authorization": "Bearer writer",
        "x-custody-event-id": "forged",
        "Webhook-Signature": "forged",
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
    assert "webhook-signature" not in found
    assert "transfer-encoding" not in found


def test_user_and_password_of_a_url_are_sent(service: Service) -> None:
    url = service.url.replace("://", "://ann:p%40ss@")
    Webhook().publish(event(url, 1, headers={"authorization": "Bearer writer"}))
    Webhook(url, headers={"authorization": "Bearer own"}).publish(event("x:", 1))
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
    assert without_secrets(destination) == expected
    with pytest.raises(InvalidArgument) as refused:
        CustodyPublisher().publish(event(destination.replace("#orders", ""), 1))
    assert "secret" not in str(refused.value)
    with pytest.raises(InvalidArgument) as refused:
        Webhook(destination.replace("https://ann:", "ftp://ann:") or "x:")
    assert "secret" not in str(refused.value)


@pytest.mark.req("O12")
def test_a_relay_logs_no_secret_of_a_destination(alone_url: str, caplog: pytest.LogCaptureFixture) -> None:
    with psycopg.connect(alone_url) as connection:
        for destination in ("https://ann:s3cret@127.0.0.1:1/?token=s3cret", "other://s3cret@host/"):
            custody.outbox.write(connection, event_type="e", payload=1, destination=destination)
    Relay(alone_url, allow_networks=LOOPBACK).drain("1s")
    assert "https://127.0.0.1:1/ is down" in caplog.text
    assert "1 events wait for other://host/" in caplog.text
    assert "s3cret" not in caplog.text


def test_no_url_is_refused_at_once() -> None:
    with pytest.raises(InvalidArgument, match="http"):
        Webhook("ftp://example.org")
