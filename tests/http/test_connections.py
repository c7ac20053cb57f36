"""Connections: how many there may be, who is closed first, and how long a server waits for a client. Real sockets."""

from __future__ import annotations

import asyncio
import gc
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import cast
from urllib.parse import urlsplit

import pytest
from tests.http.conftest import Http
from tests.waiting import wait_for
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

import custody
from custody.errors import Busy
from custody.http import connections as bounds
from custody.http import protocol
from custody.http.buffers import SMALL, Buffer

pytestmark = [pytest.mark.core, pytest.mark.req("X5")]

WHOLE = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def connect(http: Http, stack: ExitStack, *, source: str = "127.0.0.1", buffer: int = 0) -> socket.socket:
    found = urlsplit(http.url)
    made = stack.enter_context(closing(socket.socket()))
    if buffer:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    made.settimeout(20)
    made.bind((source, 0))
    made.connect((found.hostname, found.port))
    return made


def is_closed(client: socket.socket, keep_alive: bytes = b"") -> bool:
    """Whether the server has ended the connection. What it has sent before is read; `keep_alive` is sent to it."""
    client.settimeout(0.02)
    try:
        if keep_alive:
            client.sendall(keep_alive)
        while client.recv(65536):
            pass
    except TimeoutError:
        return False
    except ConnectionError:
        return True
    return True


def reasons(http: Http) -> dict[str, int]:
    assert http.state is not None
    return http.state.connections.closed


@pytest.mark.parametrize(
    "head",
    [
        b"POST /messages HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n",
        b"POST /messages HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n186A0\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n",
        b"GET /nowhere HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n",
    ],
)
def test_the_rest_of_a_body_is_not_waited_for_after_the_answer(
    c: custody.Custody, serve: Callable[..., Http], opened: ExitStack, monkeypatch: pytest.MonkeyPatch, head: bytes
) -> None:
    monkeypatch.setattr(protocol, "LINGER", 0.3)
    c.create_api_key("boss", admin=["*"])
    http = serve()
    silent, dripping = connect(http, opened), connect(http, opened)
    for client in (silent, dripping):
        client.sendall(head)
        assert client.recv(65536).startswith((b"HTTP/1.1 401 ", b"HTTP/1.1 200 "))
    wait_for(lambda: is_closed(silent), "the connection without a body is closed", timeout=5)
    wait_for(lambda: is_closed(dripping, b" "), "the one whose body comes in drops is closed", timeout=5)


def test_an_answer_before_the_body_does_not_end_a_connection_on_which_the_body_comes(
    c: custody.Custody, serve: Callable[..., Http], opened: ExitStack
) -> None:
    c.create_api_key("boss", admin=["*"])
    client = connect(serve(), opened)
    client.sendall(b"POST /messages HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n")
    assert client.recv(65536).startswith(b"HTTP/1.1 401 ")
    client.sendall(b"0123456789" + WHOLE)
    assert client.recv(65536).startswith(b"HTTP/1.1 200 ")


def test_after_the_answer_no_more_of_a_body_is_read_than_a_body_may_have(
    c: custody.Custody, serve: Callable[..., Http], opened: ExitStack
) -> None:
    c.create_api_key("boss", admin=["*"])
    client = connect(serve(), opened)
    client.sendall(b"POST /messages HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000000\r\n\r\n")
    with pytest.raises(ConnectionError):
        client.sendall(b"x" * 100_000_000)


def posted(body: bytes, *headers: bytes) -> bytes:
    lines = [b"POST /topics HTTP/1.1", b"Host: localhost", *headers]
    return b"\r\n".join([*lines, b"", body])


@pytest.mark.parametrize("piece", [10, 10_000])
@pytest.mark.parametrize("framing", [b"Content-Length: 17", b"Transfer-Encoding: chunked"])
def test_a_body_is_read_although_another_protocol_is_offered(
    http_: Http, opened: ExitStack, framing: bytes, piece: int
) -> None:
    """As some clients do with every request (h2c). The body must not be taken for a request either."""
    body = b'{"name":"orders"}' if b"17" in framing else b'11\r\n{"name":"orders"}\r\n0\r\n\r\n'
    client = connect(http_, opened)
    whole = posted(body, b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAMAAABk", framing)
    sent = whole + WHOLE
    for start in range(0, len(sent), piece):
        client.sendall(sent[start : start + piece])
    received = b""
    while received.count(b"HTTP/1.1 ") < 2 or not received.endswith(b"}"):
        chunk = client.recv(65536)
        assert chunk, f"the connection is closed after {received!r}"
        received += chunk
    assert received.startswith(b"HTTP/1.1 201 ")
    assert b'{"status":"ok"}' in received


def test_an_answer_without_a_body_comes_at_once(http_: Http, opened: ExitStack) -> None:
    client = connect(http_, opened)
    for _ in range(2):
        client.sendall(b"HEAD /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert client.recv(65536).startswith(b"HTTP/1.1 405 ")
    client.sendall(WHOLE)
    assert client.recv(65536).startswith(b"HTTP/1.1 200 ")


def test_empty_lines_keep_no_connection(serve: Callable[..., Http], opened: ExitStack) -> None:
    http = serve(body_timeout="300ms")
    fresh, used = connect(http, opened), connect(http, opened)
    used.sendall(WHOLE)
    assert used.recv(65536).startswith(b"HTTP/1.1 200 ")
    for client in (fresh, used):
        wait_for(lambda client=client: is_closed(client, b"\r\n"), "the connection is closed", timeout=5)


def test_many_headers_are_refused(http_: Http, opened: ExitStack) -> None:
    client = connect(http_, opened)
    client.sendall(WHOLE[:-2] + b"a: b\r\n" * protocol.MOST_HEADERS + b"\r\n")
    assert client.recv(65536).startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize("source", ["127.0.0.1", "127.0.0.2"])
def test_callers_without_a_key_keep_nobody_out_who_has_one(
    c: custody.Custody, serve: Callable[..., Http], opened: ExitStack, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    headers = {"Authorization": f"Bearer {c.create_api_key('boss', admin=['*']).secret}"}
    c.create_topic("orders")
    c.create_group("orders", "g")
    http = serve(max_connections=24, max_connections_per_address=16)
    held = connect(http, opened)
    shown = f"GET /topics HTTP/1.1\r\nHost: localhost\r\nAuthorization: {headers['Authorization']}\r\n\r\n".encode()
    held.sendall(shown)
    assert held.recv(65536).startswith(b"HTTP/1.1 200 ")
    with ThreadPoolExecutor(1) as clients:
        poll = clients.submit(http.get, "/messages/orders?group=g&wait=20s", headers=headers)
        wait_for(lambda: len(http.state.long_polls), "a consumer waits")
        crowd = []
        for number in range(100):
            crowd.append(connect(http, opened, source=source))
            crowd[-1].sendall(b"POST /messages HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n"[:number])
            if number % 10 == 9:
                assert http.get("/topics", headers=headers).status == 200
                held.sendall(shown)
                assert held.recv(65536).startswith(b"HTTP/1.1 200 "), "a connection with a key is kept"
        assert http.state.connections.count()[0] == 2
        assert reasons(http)["crowded"] >= 70
        monkeypatch.setattr(bounds, "MOMENT", 0.0)  # more than a quarter stays no longer than that
        for _ in range(20):
            connect(http, opened, source=source)
        wait_for(lambda: http.state.connections.count()[1] <= 6, "a quarter is left to those without a key")
        c.publish("orders", 1)
        assert len(poll.result().json["messages"]) == 1


def test_an_address_has_its_own_limit(c: custody.Custody, serve: Callable[..., Http], opened: ExitStack) -> None:
    c.create_topic("orders")
    c.create_group("orders", "g")
    http = serve(max_connections=100, max_connections_per_address=3)
    poll = b"GET /messages/orders?group=g&wait=20s HTTP/1.1\r\nHost: localhost\r\n\r\n"
    for number in range(3):  # each of them is being served
        connect(http, opened, source="127.0.0.2").sendall(poll)
        wait_for(lambda number=number: len(http.state.long_polls) == number + 1, "a consumer waits")
    refused = connect(http, opened, source="127.0.0.2").recv(65536)
    assert refused.startswith(b"HTTP/1.1 503 ")
    assert b'"code":"busy"' in refused
    assert b"--max-connections" in refused
    assert b"retry-after: 1\r\n" in refused
    assert reasons(http)["refused"] == 1
    assert http.get("/topics").status == 200, "from another address"
    assert len(http.state.long_polls) == 3


def test_an_idle_connection_makes_room(c: custody.Custody, serve: Callable[..., Http], opened: ExitStack) -> None:
    http = serve(max_connections=4)
    idle = []
    for _ in range(4):
        idle.append(client := connect(http, opened))
        client.sendall(WHOLE.replace(b"/healthz", b"/topics"))
        assert client.recv(65536).startswith(b"HTTP/1.1 200 ")
    assert http.state.connections.count() == (4, 0)
    assert http.get("/topics").status == 200
    assert [is_closed(client) for client in idle] == [True, False, False, False]


def test_addresses_of_one_network_are_one_client() -> None:
    class Peer(asyncio.Transport):
        def __init__(self, address: str) -> None:
            super().__init__({"peername": (address, 1, 0, 0)})

    def client(address: str) -> str:
        return bounds.client_of(Peer(address))

    assert client("2001:db8:1:2:3::4") == client("2001:db8:1:2:ffff::1") != client("2001:db8:1:3::4")
    assert client("::ffff:10.0.0.1") == client("10.0.0.1") != client("10.0.0.2")
    assert bounds.client_of(asyncio.Transport({"peername": ""})) == "-"


READ = b"GET /topics/orders/partitions/0/messages?max=1000 HTTP/1.1\r\nHost: localhost\r\n\r\n"


def fill(c: custody.Custody, megabytes: int) -> None:
    c.create_topic("orders")
    c.publish_many("orders", [b"x" * 500_000] * (2 * megabytes))


@pytest.mark.chaos
def test_a_client_that_takes_nothing_is_cut_and_one_that_reads_slowly_is_not(
    c: custody.Custody, serve: Callable[..., Http], opened: ExitStack
) -> None:
    fill(c, 10)
    http = serve(write_timeout="500ms")
    stalled = [connect(http, opened, buffer=4096) for _ in range(3)]
    slow = connect(http, opened, buffer=4096)
    for client in (slow, *stalled):
        client.sendall(READ)
    received, began = 0, time.monotonic()
    while time.monotonic() < began + 2:  # four times as long as nothing may be taken
        received += len(slow.recv(5_000))
    wait_for(lambda: reasons(http)["unread"] == 3, "the others are cut", timeout=10)
    while received < 13_000_000:  # the payload in base64
        chunk = slow.recv(1_000_000)
        assert chunk, "the answer breaks off"
        received += len(chunk)
    wait_for(lambda: http.state.answers.held == 0, "nothing is held any more")
    assert reasons(http)["unread"] == 3
    exposed = http.get("/metrics").body.decode()
    assert 'custody_http_connections_closed_total{reason="unread"} 3.0' in exposed
    assert 'custody_http_buffered_bytes{kind="answers"} ' in exposed
    assert 'custody_http_connections{state="trusted"} ' in exposed


def test_what_the_system_holds_is_not_taken_yet() -> None:
    """It takes megabytes at once, and asks for more only when a third is gone: a slow reader would look like none."""

    async def look() -> None:
        made = asyncio.get_running_loop().create_future()
        server = await asyncio.start_server(lambda _, writer: made.set_result(writer), "127.0.0.1", 0)
        with closing(socket.socket()) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(server.sockets[0].getsockname())
            transport = (await made).transport
            connection = bounds.Connection(transport, "-", 0.0)
            bounds.CountingTransport(transport, connection).write(bytes(20_000_000))
            assert not connection.stalls(1.0, 30.0), "the first look"
            left = 100_000
            while left:
                left -= len(client.recv(min(left, 4_096)))
            assert not connection.stalls(40.0, 30.0)
            assert connection.stalls(80.0, 30.0), "nothing was taken since"
            transport.abort()
        server.close()

    asyncio.run(look())


def test_a_head_is_written_with_its_body_and_not_lost_without_one() -> None:
    class Written:
        def __init__(self) -> None:
            self.calls: list[bytes] = []

        def write(self, data: bytes) -> None:
            self.calls.append(data)

        def close(self) -> None:
            self.calls.append(b"closed")

        def is_closing(self) -> bool:
            return False

    inner = Written()
    transport = cast(asyncio.Transport, inner)
    connection = bounds.Connection(transport, "-", 0.0)
    counting = bounds.CountingTransport(transport, connection)
    for head, body in ((b"head ", b"body"), (b"next ", b"")):
        counting.hold()
        counting.write(head)
        counting.write(body)
    counting.write(b"plain")
    assert connection.written == 19
    counting.hold()
    counting.write(b"alone")
    counting.close()
    assert inner.calls == [b"head body", b"next ", b"plain", b"alone", b"closed"]
    assert connection.written == 24


def test_answers_that_nobody_reads_take_no_more_than_the_limit(
    c: custody.Custody, serve: Callable[..., Http], opened: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "SOON", 0.5)
    fill(c, 4)
    http = serve(max_buffered="20MB")
    most = 0
    for _ in range(30):  # 5 MB each
        connect(http, opened, buffer=4096).sendall(READ)
        most = max(most, http.state.answers.held)
    answer = http.get("/topics/orders/partitions/0/messages?max=1000", timeout=60)
    assert (answer.status, len(answer.body) > 5_000_000) == (200, True), "whoever reads has its turn"

    def cut() -> int:
        nonlocal most
        most = max(most, http.state.answers.held)
        return reasons(http)["unread"]

    wait_for(lambda: cut() >= 20, "those who do not read are cut, long before the usual time", timeout=25)
    # one request more than fits may be under way in each thread
    assert most <= 20e6 + 10 * 6e6


def cycles() -> int:
    """The requests that the server has read and not answered."""
    gc.collect()
    return sum(isinstance(each, RequestResponseCycle) for each in gc.get_objects())


def test_requests_that_are_sent_at_once_are_read_one_after_the_other(
    c: custody.Custody, http_: Http, opened: ExitStack
) -> None:
    c.create_topic("orders")
    c.create_group("orders", "g")
    client = connect(http_, opened)
    client.sendall(b"GET /messages/orders?group=g&wait=20s HTTP/1.1\r\nHost: localhost\r\n\r\n")
    wait_for(lambda: len(http_.state.long_polls), "a consumer waits")
    count, before = 5_000, cycles()
    with ThreadPoolExecutor(1) as sending:
        sent = sending.submit(client.sendall, WHOLE * count)
        wait_for(lambda: cycles() > before, "they come")
        assert cycles() - before < 2 * protocol.PIECE / len(WHOLE), "the others wait in the network"
        c.publish("orders", 1)
        received = b""
        while received.count(b'{"status":"ok"}') < count:
            chunk = client.recv(1_000_000)
            assert chunk, "the connection is closed"
            received += chunk
        sent.result()


def test_requests_with_bodies_that_are_sent_at_once_are_all_taken(
    c: custody.Custody, http_: Http, opened: ExitStack
) -> None:
    c.create_topic("orders")
    client = connect(http_, opened)
    body = b'{"topic": "orders", "payload": "%s"}' % (b"x" * 3000)
    request = b"POST /messages HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    with ThreadPoolExecutor(1) as sending:
        sent = sending.submit(client.sendall, request * 300)
        client.settimeout(20)
        received = b""
        while received.count(b'"duplicate":false') < 300:
            chunk = client.recv(1_000_000)
            assert chunk
            received += chunk
        sent.result()
    assert c.topic("orders").message_count == 300


def test_large_bodies_share_the_memory(c: custody.Custody, serve: Callable[..., Http], opened: ExitStack) -> None:
    c.create_topic("orders")
    http = serve(max_buffered="1MB")
    body = b'{"topic": "orders", "payload": "%s"}' % (b"x" * 700_000)
    head = b"POST /messages HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
    first = connect(http, opened)
    first.sendall(head)
    wait_for(lambda: http.state.bodies.held == len(body), "the first has its place")
    assert http.post("/messages", {"topic": "orders", "payload": 1}).status == 200, "small ones need none"
    with ThreadPoolExecutor(1) as clients:
        second = clients.submit(http, "POST", "/messages", body)
        wait_for(lambda: http.state.bodies._waiting, "the second waits")
        first.sendall(body)
        assert first.recv(65536).startswith(b"HTTP/1.1 200 ")
        assert second.result().status == 200
    held = connect(http, opened)
    held.sendall(head)
    wait_for(lambda: http.state.bodies.held == len(body), "it has its place, and sends nothing")
    with ThreadPoolExecutor(1) as clients:
        third = clients.submit(http, "POST", "/messages", body)
        wait_for(lambda: http.state.bodies._waiting, "the third waits")
        held.close()
        assert third.result().status == 200
    wait_for(lambda: http.state.bodies.held == 0, "nothing is held any more")


def test_whoever_gives_up_waiting_for_room_takes_none() -> None:
    async def go() -> None:
        buffer = Buffer(10 * SMALL, "bodies")
        assert await buffer.take(SMALL, 1) == 0
        held = await buffer.take(100 * SMALL, 1)
        assert (held, buffer.full()) == (10 * SMALL, True), "what is too large for all goes alone"
        with pytest.raises(Busy, match="bodies"):
            await buffer.take(2 * SMALL, 0.01)
        with pytest.raises(Busy):
            await buffer.room(0.01)
        waiting = [asyncio.ensure_future(buffer.take(size * SMALL, 5)) for size in (9, 2, 2)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        await asyncio.wait([waiting[0]])
        buffer.give(held)
        assert [await each for each in waiting[1:]] == [2 * SMALL, 2 * SMALL]
        assert buffer.held == 4 * SMALL
        late = asyncio.ensure_future(buffer.take(8 * SMALL, 5))
        await asyncio.sleep(0)
        buffer.give(4 * SMALL)
        late.cancel()  # just when its turn had come
        await asyncio.wait([late])
        assert buffer.held == 0

    asyncio.run(go())
