"""Looking at what happened, at the server, and at what it says to odd requests."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

import pytest
from tests.http.conftest import Http
from tests.http.steps import error, make, publish, received

pytestmark = [pytest.mark.core, pytest.mark.req("G18")]


def test_health_and_readiness(http_: Http) -> None:
    assert http_.get("/healthz").json == {"status": "ok"}
    assert http_.get("/readyz").json == {"status": "ready"}


@pytest.mark.req("V3")
def test_the_history_of_a_message_names_who_did_it(http_: Http) -> None:
    make(http_, group="stock")
    publish(http_, 1)
    (message,) = received(http_, group="stock")
    body = {"receipt": message["receipt"], "error": "timeout"}
    http_.post("/messages/nack", body, headers={"X-Custody-Worker": "shelf-7"})
    path = "/topics/orders/partitions/0/messages/0/history"
    claimed, failed = http_.get(path).json
    assert (claimed["kind"], claimed["group"], claimed["attempt"], claimed["worker"]) == ("claim", "stock", 1, "http")
    assert (failed["error"], failed["worker"], failed["lease_id"]) == ("timeout", "shelf-7", claimed["lease_id"])
    assert len(http_.get(f"{path}?group=stock").json) == 2
    assert http_.get(f"{path}?group=nobody").json == []
    assert error(http_.get("/topics/orders/partitions/0/messages/x/history")) == (422, "invalid_argument", "offset")
    assert error(http_.get("/topics/nothing/partitions/0/messages/0/history")) == (404, "topic_not_found", None)


def test_handling_times_and_the_database(http_: Http) -> None:
    make(http_, group="stock")
    publish(http_, 1)
    (message,) = received(http_, group="stock")
    http_.post("/messages/ack", {"receipt": message["receipt"]})
    (found,) = http_.get("/handling-times?topic=orders&group=stock").json
    assert (found["topic"], found["group"], found["visibility_timeout"]) == ("orders", "stock", 30.0)
    server = http_.get("/server").json
    assert server["version_num"] >= 140000
    assert server["old_transactions"] == []


@pytest.mark.req("G20")
@pytest.mark.parametrize("path", ["/", "//", "/nothing", "/topics/", "/topics/a%2Fb", "/messages/", "/topics/a/b/c/d"])
def test_a_path_that_is_not_there(http_: Http, path: str) -> None:
    for method in ("GET", "POST", "DELETE"):
        assert error(http_(method, path)) == (404, "no_such_path", None), method


@pytest.mark.req("G20")
@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("PUT", "/topics", "GET, POST"),
        ("POST", "/topics/orders", "GET, PATCH, DELETE"),
        ("OPTIONS", "/topics/orders/groups/g", "GET, PATCH, DELETE"),
        ("DELETE", "/messages", "POST"),
        ("POST", "/messages/orders", "GET"),
        ("GET", "/transactions/begin", "POST"),
        ("POST", "/healthz", "GET"),
        ("POST", "/openapi.json", "GET"),
        ("TRACE", "/docs", "GET"),
    ],
)
def test_a_method_that_a_path_does_not_have(http_: Http, method: str, path: str, allowed: str) -> None:
    answer = http_(method, path)
    assert error(answer) == (405, "method_not_allowed", None)
    assert answer.headers["allow"] == allowed


@pytest.mark.req("G20")
def test_head_has_no_body_and_leases_nothing(http_: Http) -> None:
    make(http_)
    publish(http_, 1)
    head = http_("HEAD", "/messages/orders")
    assert (head.status, head.body, head.headers["allow"]) == (405, b"", "GET")
    assert len(received(http_)) == 1


@pytest.mark.req("G20")
def test_every_answer_has_a_request_id_and_takes_the_one_that_is_sent(http_: Http) -> None:
    assert len(http_.get("/topics").headers["x-request-id"]) == 32
    mine = http_.get("/topics/nothing", headers={"X-Request-Id": "mine-1"})
    assert (mine.headers["x-request-id"], mine.json["error"]["request_id"]) == ("mine-1", "mine-1")


def test_no_answer_is_to_be_kept_by_anything_in_between(http_: Http) -> None:
    make(http_)
    for path in ("/messages/orders", "/messages/orders/0", "/topics", "/topics/nothing", "/metrics", "/healthz", "/no"):
        assert http_.get(path).headers["cache-control"] == "no-store", path
    assert http_.post("/messages", {"topic": "orders", "payload": 1}).headers["cache-control"] == "no-store"


@pytest.mark.req("G20")
@pytest.mark.parametrize(
    "request_",
    [
        b"GET /topics HTTP/1.1\r\nHost: localhost\r\nContent-Length: x\r\n\r\n",
        b"GET\r\n\r\n",
        b"\x00\xff\r\n\r\n",
        b"GET /topics/\xff HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
        b"POST /messages HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
)
def test_what_is_hardly_http_is_no_fault_of_the_server(http_: Http, request_: bytes) -> None:
    address = urlsplit(http_.url)
    with socket.create_connection((address.hostname, address.port), timeout=10) as connection:
        connection.sendall(request_)
        connection.shutdown(socket.SHUT_WR)
        answer = connection.recv(1000)
    assert not answer or answer.split()[1][:1] == b"4", answer
    assert http_.get("/healthz").status == 200


@pytest.mark.req("G20")
def test_a_body_that_comes_in_pieces_is_one_body(http_: Http) -> None:
    make(http_)
    address = urlsplit(http_.url)
    head = b"POST /messages HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    with socket.create_connection((address.hostname, address.port), timeout=10) as connection:
        connection.sendall(head)
        for piece in (b'{"topic": "or', b'ders", "payl', b'oad": "whole"}'):
            connection.sendall(b"%x\r\n%s\r\n" % (len(piece), piece))
        connection.sendall(b"0\r\n\r\n")
        answer = connection.makefile("rb").read()
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert received(http_)[0]["payload"] == "whole"
