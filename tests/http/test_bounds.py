"""Bounds: how large a request may be, how long it may take to come, and how long the database may take for it."""

from __future__ import annotations

import gzip
import json
import socket
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import closing
from http.client import HTTPConnection
from urllib.parse import urlsplit

import psycopg
import pytest
from psycopg import sql
from tests.http.conftest import Http, Process, Response, served
from tests.waiting import wait_for

import custody
from custody.errors import TooLarge
from custody.http.body import inflate
from custody.http.protocol import LARGEST_HEAD

pytestmark = pytest.mark.core


def connect(http: Http) -> socket.socket:
    found = urlsplit(http.url)
    return socket.create_connection((found.hostname, found.port), timeout=20)


def answer_to(http: Http, *parts: bytes) -> bytes:
    """What comes back for these bytes, until the server closes the connection."""
    with closing(connect(http)) as sock:
        try:
            for part in parts:
                sock.sendall(part)
        except (BrokenPipeError, ConnectionResetError):
            pass  # it has answered already
        received = b""
        try:
            while chunk := sock.recv(65536):
                received += chunk
        except ConnectionResetError:
            pass
        return received


@pytest.mark.req("G19")
def test_a_body_that_is_too_large_is_refused_before_it_is_read(c: custody.Custody, serve: Callable[..., Http]) -> None:
    c.create_topic("orders")
    http = serve(max_body="1KB")
    message = json.dumps({"topic": "orders", "payload": "x"}).encode()
    exact = message[:-2] + b"x" * (1024 - len(message)) + message[-2:]
    assert len(exact) == 1024
    assert http("POST", "/messages", exact).status == 200
    refused = http("POST", "/messages", exact + b" ")
    assert (refused.status, refused.code) == (413, "too_large")
    assert "--max-body" in refused.json["error"]["remedy"]
    # by its Content-Length alone: nothing of the body has come
    head = b"POST /messages HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 1025\r\n\r\n"
    assert answer_to(http, head).startswith(b"HTTP/1.1 413 ")
    assert c.topic("orders").message_count == 1


@pytest.mark.req("G19")
def test_a_body_that_grows_too_large_is_refused(c: custody.Custody, serve: Callable[..., Http]) -> None:
    c.create_topic("orders")
    http = serve(max_body="1KB")

    def send(size: int) -> int:
        def chunks() -> Iterator[bytes]:
            yield b'{"topic": "orders", "payload": "'
            for _ in range(size // 100):
                yield b"x" * 100
            yield b'"}'

        connection = HTTPConnection(urlsplit(http.url).netloc, timeout=20)
        try:
            connection.request("POST", "/messages", chunks(), {"Transfer-Encoding": "chunked"}, encode_chunked=True)
            return connection.getresponse().status
        finally:
            connection.close()

    assert send(900) == 200
    assert send(1000) == 413
    assert send(50_000) == 413
    assert c.topic("orders").message_count == 1


@pytest.mark.req("G19")
def test_a_batch_that_is_too_large_is_refused(c: custody.Custody, serve: Callable[..., Http]) -> None:
    c.create_topic("orders")
    http = serve(max_batch=3)
    assert http.post("/messages", {"topic": "orders", "messages": [{"payload": n} for n in range(3)]}).status == 200
    refused = http.post("/messages", {"topic": "orders", "messages": [{"payload": n} for n in range(4)]})
    assert (refused.status, refused.code) == (413, "too_large")
    lease = http.get("/messages/orders?max=3").json["lease_id"]
    outcomes = [{"offset": n, "outcome": "ack"} for n in range(4)]
    for path, body in (
        ("ack", {"lease_id": lease, "offsets": [0, 1, 2, 3]}),
        ("nack", {"messages": [{"receipt": f"{lease}:{n}"} for n in range(4)]}),
        ("settle", {"lease_id": lease, "outcomes": outcomes}),
    ):
        assert http.post(f"/messages/{path}", body).status == 413
    assert c.topic("orders").message_count == 3
    assert c.stats("orders", "default").in_flight == 3


@pytest.mark.req("G19")
def test_a_lease_is_not_larger_than_what_one_request_can_settle(c: custody.Custody, serve: Callable[..., Http]) -> None:
    c.create_topic("orders")
    c.create_group("orders", "g", custody.Policy(max_attempts=9))
    c.publish_many("orders", range(10))
    http = serve(max_batch=4)
    assert len(http.get("/messages/orders?group=g&max=10").json["messages"]) == 4
    with custody.connect(http.url) as remote:
        lease = remote.claim("orders", "g", max_messages=10)
        outcomes = {m.offset: custody.Outcome("ack" if m.offset % 2 else "nack") for m in lease}
        assert remote.settle(lease.lease_id, outcomes).settled == 4


@pytest.mark.req("G19")
@pytest.mark.parametrize("path", ["/healthz", "/messages/orders"])
def test_a_query_with_many_parameters_is_refused_at_once(http_: Http, path: str) -> None:
    many = "&".join([*(f"p{n}" for n in range(9_000)), "p8999"])
    refused = http_.get(f"{path}?{many}")  # before they are compared: nobody else is served meanwhile
    assert (refused.status, refused.code) == (422, "invalid_argument")
    assert "100 parameters" in refused.json["error"]["message"]
    twice = http_.get(f"{path}?group=g&max=1&group=h")
    assert (twice.status, twice.json["error"]["path"]) == (422, "$.group")


def test_a_standby_is_told_from_a_failure_and_its_connections_are_given_up(
    database_url: str, db: psycopg.Connection
) -> None:
    name = sql.Identifier(db.info.dbname)
    with custody.connect(database_url) as before:
        before.create_topic("orders")
    db.execute(sql.SQL("ALTER DATABASE {} SET default_transaction_read_only = on").format(name))
    with custody.connect(database_url) as c, served(c) as http:
        refused = http.post("/messages", {"topic": "orders", "payload": 1})
        assert (refused.status, refused.code) == (503, "database_unavailable")
        assert refused.headers["retry-after"] == "1"
        db.execute(sql.SQL("ALTER DATABASE {} RESET default_transaction_read_only").format(name))
        wait_for(
            lambda: http.post("/messages", {"topic": "orders", "payload": 1}).status == 200, "it is the primary again"
        )


@pytest.mark.req("G19")
def test_a_body_that_does_not_come_is_given_up(serve: Callable[..., Http]) -> None:
    http = serve(body_timeout="200ms")
    head = b"POST /messages HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n"
    answer = answer_to(http, head, b'{"topic"')
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"connection: close" in answer.lower()
    assert b'"request_timeout"' in answer
    # in drops, each of them in time, it is no faster
    with closing(connect(http)) as sock:
        sock.sendall(head)
        sock.settimeout(0.02)
        for _ in range(90):
            sock.sendall(b" ")
            try:
                assert sock.recv(65536).startswith(b"HTTP/1.1 408 ")
                break
            except TimeoutError:
                continue
        else:
            pytest.fail("the server waits for as long as something comes")


@pytest.mark.req("G19")
def test_a_head_that_does_not_come_is_given_up(serve: Callable[..., Http]) -> None:
    http = serve(body_timeout="200ms")
    assert answer_to(http) == b"", "nothing was asked: the connection is closed"
    assert answer_to(http, b"GET /healthz HTTP/1.1\r\nHost: local").startswith(b"HTTP/1.1 408 ")
    whole = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
    late = answer_to(http, whole + b"GET /healthz HTTP/1.1\r\n")
    assert [late.count(b"HTTP/1.1 200 "), late.count(b"HTTP/1.1 408 ")] == [1, 1], "on a connection that is kept, too"


@pytest.mark.req("G19")
def test_a_head_that_is_too_large_is_refused(serve: Callable[..., Http]) -> None:
    http = serve()
    start = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    room = LARGEST_HEAD - 1000
    assert answer_to(http, start, b"X-Long: " + b"x" * room + b"\r\n\r\n").startswith(b"HTTP/1.1 200 ")
    for parts in (
        [start, b"X-Long: ", *[b"x" * 10_000] * 100],  # one header without an end
        [start, *[b"X-Many: " + b"x" * 100 + b"\r\n"] * 10_000],  # headers without an end
        [start, b"X-Long: " + b"x" * (LARGEST_HEAD + 1) + b"\r\n\r\n"],  # whole, in one piece
        [b"GET /healthz?" + b"x" * 200_000],
    ):
        assert answer_to(http, *parts).startswith(b"HTTP/1.1 431 ")
    assert http.get("/healthz").status == 200


@pytest.mark.req("G20")
def test_what_is_not_http_is_refused(serve: Callable[..., Http]) -> None:
    http = serve()
    for sent in (b"\x16\x03\x01\x00\xff\x01", b"NONSENSE\r\n\r\n", b"GET / HTTP/1.1\r\nContent-Length: -1\r\n\r\n"):
        assert answer_to(http, sent).startswith(b"HTTP/1.1 400 ")
    upgrade = b"GET /topics HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade, close\r\nUpgrade: websocket\r\n"
    key = b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    assert b" 101 " not in answer_to(http, upgrade + key).split(b"\r\n")[0]
    assert http.get("/healthz").status == 200


@pytest.mark.req("G19")
def test_a_call_that_takes_the_database_too_long_is_busy(
    c: custody.Custody, db: psycopg.Connection, process: Callable[..., Process]
) -> None:
    c.create_topic("orders")
    http = process("--statement-timeout", "200ms").http
    with db.transaction():
        db.execute("SELECT FROM custody.heads FOR UPDATE")
        refused = http.post("/messages", {"topic": "orders", "payload": 1})
        assert (refused.status, refused.code) == (503, "busy")
        assert refused.headers["retry-after"] == "1"
    assert http.post("/messages", {"topic": "orders", "payload": 1}).status == 200
    assert c.topic("orders").message_count == 1


@pytest.mark.req("G19")
def test_a_body_is_read_no_further_than_the_batch_that_is_allowed(
    c: custody.Custody, serve: Callable[..., Http]
) -> None:
    c.create_topic("orders")
    c.create_group("orders", "default")
    http = serve(max_batch=3)
    lease = "3f0c6f4e-6d7b-4f2c-9a63-0c8a5d2f1b7e"
    event = {"event_id": lease, "payload": 1}
    many: list[tuple[str, dict[str, object], str, list[object]]] = [
        ("/messages", {"topic": "orders"}, "messages", [{"payload": 1}]),
        ("/messages/ack", {}, "messages", [{"receipt": f"{lease}:1"}]),
        ("/messages/settle", {"lease_id": lease}, "outcomes", [{"offset": 1, "outcome": "ack"}]),
        ("/topics/orders/events", {}, "events", [event]),
    ]
    for path, body, name, element in many:
        # a fifth one that is no JSON is not met
        text = json.dumps({**body, name: element * 5})[:-2].encode() + b", nonsense"
        refused = http("POST", path, text)
        assert (refused.status, refused.code) == (413, "too_large"), path
        assert http.post(path, {**body, name: element * 3}).status != 413
    offsets = {"offsets": [0, 1, 2, 3]}
    transaction = {"transaction_id": lease, "lease_id": lease, **offsets}
    for path, named in (
        ("/transactions/ack", transaction),
        ("/topics/orders/groups/default/redrive", offsets),
        ("/topics/orders/groups/default/discard", offsets),
    ):
        assert http.post(path, named).code == "too_large", path


def test_a_body_is_read_only_for_those_who_have_the_right(c: custody.Custody, serve: Callable[..., Http]) -> None:
    c.create_topic("orders")
    elsewhere = ["elsewhere"]
    keys = {
        "produce": c.create_api_key("produce", produce=elsewhere).secret,
        "consume": c.create_api_key("consume", consume=elsewhere).secret,
    }
    http = serve()
    for path, right in (
        ("/topics/orders/events", "produce"),
        ("/topics/orders/groups", "consume"),
        ("/topics/orders/groups/default/redrive", "consume"),
        ("/messages", "consume"),
        ("/messages/ack", "produce"),
        ("/messages/nack", "produce"),
        ("/messages/settle", "produce"),
        ("/transactions/ack", "produce"),
        ("/topics", "produce"),
    ):
        answer = http("POST", path, b"nonsense", headers={"Authorization": f"Bearer {keys[right]}"})
        assert (answer.status, answer.code) == (403, "forbidden"), path


def packed(body: object) -> bytes:
    return gzip.compress(json.dumps(body).encode())


@pytest.mark.req("G19")
def test_a_compressed_body_is_read_within_the_limit(c: custody.Custody, serve: Callable[..., Http]) -> None:
    c.create_topic("orders")
    http = serve(max_body="64KB")

    def send(body: bytes, encoding: str = "gzip", path: str = "/messages") -> Response:
        return http("POST", path, body, headers={"Content-Encoding": encoding})

    message = {"topic": "orders", "payload": "x" * 60_000}
    assert send(packed(message)).status == 200
    assert send(packed(message), "X-GZIP ").status == 200
    whole = json.dumps(message).encode()
    assert send(gzip.compress(whole[:100]) + gzip.compress(whole[100:])).status == 200, "of several members"
    assert send(whole, "identity").status == 200
    assert send(packed({"name": "more"}), path="/topics").status == 201, "by any operation"
    assert c.topic("orders").message_count == 4
    for bomb in (gzip.compress(b" " * 65_537), gzip.compress(b" " * 40_000) * 2, gzip.compress(b" " * 60_000_000)):
        refused = send(bomb)
        assert (refused.status, refused.code) == (413, "too_large")
    for broken in (whole, packed(message)[:-9], packed(message) + b"x"):
        refused = send(broken)
        assert (refused.status, refused.code) == (400, "invalid_json")
    for encoding in ("br", "deflate", "gzip, gzip", "zstd", "\xff"):
        refused = send(packed(message), encoding)
        assert (refused.status, refused.code) == (415, "unsupported_encoding")
        assert "gzip" in refused.json["error"]["remedy"]
        assert refused.headers["accept-encoding"] == "gzip"
    assert c.topic("orders").message_count == 4
    assert http.state.bodies.held == 0


@pytest.mark.req("G19")
def test_a_bomb_is_not_inflated_beyond_the_limit() -> None:
    bomb = gzip.compress(b"\0" * 100_000_000)
    tracemalloc.start()
    try:
        with pytest.raises(TooLarge):
            inflate(bomb, 1_000_000)
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.req("G19")
def test_many_members_cost_no_more_than_their_bytes() -> None:
    empty = gzip.compress(b"")

    def took(count: int) -> float:
        began = time.process_time()
        assert inflate(empty * count + gzip.compress(b"{}"), 1_000_000) == b"{}"
        return time.process_time() - began

    few = min(took(4_000) for _ in range(3))
    assert took(80_000) < 100 * few, "twenty times as many take twenty times as long, with slack"
