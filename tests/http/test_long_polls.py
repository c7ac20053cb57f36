"""Long polls: answered as soon as there is something, and cheap while there is nothing."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import psycopg
import pytest
from tests.conftest import Clock
from tests.http.conftest import Http, Process, Response, served
from tests.waiting import wait_for

import custody
from custody.http import long_polls

pytestmark = pytest.mark.core


class Poll:
    """A long poll in a thread of the test."""

    def __init__(self, http: Http, path: str) -> None:
        self.answer: Response | None = None
        self.took = 0.0
        self._thread = threading.Thread(target=self._run, args=[http, path])
        self._thread.start()

    def _run(self, http: Http, path: str) -> None:
        began = time.monotonic()
        self.answer = http.get(path, timeout=60)
        self.took = time.monotonic() - began

    def result(self) -> Response:
        self._thread.join(30)
        assert self.answer is not None, "the poll was not answered"
        return self.answer

    @property
    def messages(self) -> list[object]:
        return [message["payload"] for message in self.result().json["messages"]]


def waiting(http: Http, count: int) -> None:
    wait_for(lambda: len(http.state.long_polls) == count, lambda: f"{len(http.state.long_polls)} wait, not {count}")


@pytest.mark.req("G4")
def test_a_poll_is_answered_by_a_publish_from_anywhere(
    c: custody.Custody, http_: Http, db: psycopg.Connection, serve: Callable[..., Http]
) -> None:
    c.create_topic("orders", partitions=3)
    other = serve()
    for publish in (
        lambda: http_.post("/messages", {"topic": "orders", "payload": "here"}),
        lambda: other.post("/messages", {"topic": "orders", "payload": "through another server"}),
        lambda: c.publish("orders", "directly"),
        lambda: db.execute("SELECT custody.send('orders', '\"by SQL\"')"),  # without a hint: found by looking
    ):
        poll = Poll(http_, "/messages/orders?wait=20s")
        waiting(http_, 1)
        publish()
        assert len(poll.messages) == 1
        assert poll.took < 15


@pytest.mark.req("G4")
def test_a_poll_acks_before_it_waits(c: custody.Custody, http_: Http) -> None:
    c.create_topic("orders")
    c.publish("orders", 1)
    first = http_.get("/messages/orders").json
    poll = Poll(http_, f"/messages/orders?wait=20s&ack={first['lease_id']}")
    waiting(http_, 1)
    assert c.trace("orders", 0, 0)[-1].kind == "ack"
    c.publish("orders", 2)
    assert poll.messages == [2]
    assert poll.result().json["settled"] == {"settled": 1, "dead": [], "released": []}
    assert [entry.kind for entry in c.trace("orders", 0, 0)] == ["claim", "ack"]


@pytest.mark.req("G4", "G15", "V4")
def test_a_poll_is_answered_when_something_becomes_due(database_url: str) -> None:
    with custody.connect(database_url) as real, served(real) as http:  # by the clock of the database
        real.create_topic("orders")
        real.create_group("orders", "g", custody.Policy(backoff=custody.Constant("300ms")))
        real.publish("orders", "retried")
        real.claim("orders", "g").nack()
        assert Poll(http, "/messages/orders?group=g&wait=20s&visibility_timeout=400ms").messages == ["retried"]
        assert Poll(http, "/messages/orders?group=g&wait=20s").messages == ["retried"]  # its lease has expired
        real.publish("orders", "delayed", delay="400ms")
        poll = Poll(http, "/messages/orders?group=g&wait=20s")
        assert poll.messages == ["delayed"]
        assert poll.took < 5


@pytest.fixture
def claims(http_: Http, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The places that the server claims from, in order."""
    seen: list[object] = []
    real = http_.state.claim

    async def claim(place: object, callers: object) -> object:
        seen.append(place)
        return await real(place, callers)

    monkeypatch.setattr(http_.state, "claim", claim)
    return seen


def test_a_poll_on_one_partition_is_not_kept_awake_by_another(
    c: custody.Custody, http_: Http, clock: Clock, claims: list[object]
) -> None:
    c.create_topic("orders", partitions=2)
    c.create_group("orders", "g")
    c.publish("orders", 1, partition=1)
    assert c.claim("orders", "g", partition=1)
    clock.move(60)  # whoever had it is dead, and nobody else asks for this partition
    assert Poll(http_, "/messages/orders/0?group=g&wait=700ms").messages == []
    assert len(claims) <= 4  # one each when it comes, at the timeout, and for late hints of the messages before


def test_a_poll_looks_less_and_less_often_for_what_somebody_holds(
    c: custody.Custody, http_: Http, clock: Clock, claims: list[object], database_url: str
) -> None:
    c.create_topic("orders")
    c.create_group("orders", "g")
    c.publish_many("orders", [1, 2])
    lease = c.claim("orders", "g", max_messages=2)
    with psycopg.connect(database_url) as own:
        lease.ack(lease.messages[0], connection=own)
        clock.move(60)  # it has expired, and cannot be folded while it is being settled
        poll = Poll(http_, "/messages/orders?group=g&wait=20s")
        wait_for(lambda: len(claims) >= 8, "it has looked often enough to have become slow")
        before = len(claims)
        until = time.monotonic() + 0.5
        wait_for(lambda: time.monotonic() > until, "half a second has passed")
        assert len(claims) - before <= 1
        own.commit()
    assert poll.messages == [2]


def test_a_poll_is_answered_when_its_group_is_resumed(c: custody.Custody, http_: Http) -> None:
    c.create_topic("orders")
    c.create_group("orders", "g")
    c.publish("orders", 1)
    http_.post("/topics/orders/groups/g/pause", {"reason": "maintenance"})
    poll = Poll(http_, "/messages/orders?group=g&wait=20s")
    waiting(http_, 1)
    http_.post("/topics/orders/groups/g/resume")
    assert poll.messages == [1]
    http_.post("/topics/orders/groups/g/pause", {"reason": "maintenance"})
    over = Poll(http_, "/messages/orders?group=g&wait=100ms").result()
    assert (over.status, over.code, over.headers["retry-after"]) == (503, "paused", "1")
    assert "maintenance" in over.json["error"]["message"]


@pytest.mark.req("V10")
def test_a_poll_is_answered_by_an_event_of_the_outbox(c: custody.Custody, http_: Http, db: psycopg.Connection) -> None:
    c.create_topic("orders")
    poll = Poll(http_, "/messages/orders?wait=20s")
    waiting(http_, 1)
    custody.outbox.write(db, event_type="placed", payload={"n": 1}, destination="orders")
    assert poll.messages == [{"n": 1}]


@pytest.mark.req("G4")
def test_an_empty_poll_ends_after_its_time_and_is_no_longer_than_the_server_allows(
    c: custody.Custody, serve: Callable[..., Http]
) -> None:
    c.create_topic("orders")
    http = serve(max_wait="300ms")
    poll = Poll(http, "/messages/orders?wait=50s")
    assert poll.result().json == {"lease_id": None, "deadline": None, "messages": [], "reason": "empty", "detail": None}
    assert 0.25 < poll.took < 10


@pytest.mark.parametrize("body", [0, 300_000])  # a GET may have one: as long as it is not read, nothing else is
def test_whoever_goes_away_leaves_the_line_and_loses_nothing(c: custody.Custody, http_: Http, body: int) -> None:
    c.create_topic("orders")
    c.create_group("orders", "g")

    async def go_away() -> None:
        parts = urlsplit(http_.url)
        _, writer = await asyncio.open_connection(parts.hostname, parts.port)
        length = b"Content-Length: %d\r\n" % body if body else b""
        writer.write(b"GET /messages/orders?group=g&wait=50s HTTP/1.1\r\nHost: 127.0.0.1\r\n%s\r\n" % length)
        writer.write(bytes(body // 2))
        await writer.drain()
        await asyncio.to_thread(waiting, http_, 1)
        writer.close()

    asyncio.run(go_away())
    waiting(http_, 0)
    c.publish("orders", 1)
    # the server may still be looking for the one who has gone: then a claim is busy
    lease = wait_for(lambda: c.claim("orders", "g"), "the message")
    assert lease.messages[0].attempt == 1


def test_what_was_for_one_who_has_gone_is_for_the_next_in_line_at_once(
    c: custody.Custody, http_: Http, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_polls, "POLL", 60.0)  # nobody looks by himself
    c.create_topic("orders")
    c.create_group("orders", "g")
    claiming, go_on = threading.Event(), threading.Event()
    real = http_.state.claim

    async def claim(place: object, callers: Sequence[object]) -> object:
        if len(callers) == 2:
            claiming.set()
            await asyncio.to_thread(go_on.wait, 20)
        return await real(place, callers)

    monkeypatch.setattr(http_.state, "claim", claim)
    first = HTTPConnection(urlsplit(http_.url).netloc)
    first.request("GET", "/messages/orders?group=g&wait=20s")
    waiting(http_, 1)
    second = Poll(http_, "/messages/orders?group=g&wait=5s")
    assert claiming.wait(20)
    first.close()
    waiting(http_, 1)
    db.execute("SELECT custody.send('orders', '1')")  # without a hint
    go_on.set()
    assert second.messages == [1]


def test_a_poll_goes_on_when_the_database_does_not_say_what_is_due(
    c: custody.Custody, http_: Http, monkeypatch: pytest.MonkeyPatch
) -> None:
    c.create_topic("orders")
    c.create_group("orders", "g")
    asked = threading.Event()

    async def next_due(place: object) -> float | None:
        asked.set()
        raise custody.errors.DatabaseUnavailable("not now")

    monkeypatch.setattr(http_.state, "next_due", next_due)
    poll = Poll(http_, "/messages/orders?group=g&wait=20s")
    assert asked.wait(20)
    c.publish("orders", 1)
    assert poll.messages == [1]


def test_those_who_wait_are_served_in_their_order(c: custody.Custody, http_: Http) -> None:
    c.create_topic("orders")
    polls = []
    for number in range(5):
        polls.append(Poll(http_, "/messages/orders?wait=20s"))
        waiting(http_, number + 1)
    for number in range(5):
        c.publish("orders", number)
        assert polls[number].messages == [number]


def test_an_expired_wait_of_one_does_not_end_that_of_another(c: custody.Custody, http_: Http, clock: Clock) -> None:
    c.create_topic("orders")
    long = Poll(http_, "/messages/orders?wait=20s")
    waiting(http_, 1)
    short = Poll(http_, "/messages/orders?wait=50ms")
    assert short.messages == []
    assert http_.get("/messages/orders").json["messages"] == []  # does not wait at all
    waiting(http_, 1)
    c.publish("orders", 1)
    assert long.messages == [1]


async def _many(url: str, count: int, group_of: Callable[[int], str], all_wait: threading.Event) -> list[bytes]:
    """So many polls on connections of their own; the answers."""
    parts = urlsplit(url)
    gate = asyncio.Semaphore(100)

    async def poll(number: int) -> bytes:
        async with gate:
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
            writer.write(
                f"GET /messages/orders?group={group_of(number)}&wait=60s HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode()
            )
            await writer.drain()
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        body = await reader.readexactly(length)
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
        return body

    answers = asyncio.gather(*(poll(number) for number in range(count)))
    await asyncio.sleep(0)
    all_wait.set()
    return await answers


@pytest.mark.req("C5", "G4")
@pytest.mark.own_database  # connections are counted
@pytest.mark.parametrize("groups", [1, 50])
@pytest.mark.parametrize("waiting_consumers", [150, pytest.param(2000, marks=pytest.mark.long)])
def test_many_wait_on_one_server_with_ten_connections(
    c: custody.Custody, process: Callable[..., Process], db: psycopg.Connection, waiting_consumers: int, groups: int
) -> None:
    c.create_topic("orders", partitions=4)
    names = [f"g{number}" for number in range(groups)]
    for name in names:
        c.create_group("orders", name)
    server = process("--connections", "10", "--max-wait", "120s")
    answers: list[bytes] = []
    sent = threading.Event()
    client = threading.Thread(
        target=lambda: answers.extend(
            asyncio.run(_many(server.http.url, waiting_consumers, lambda n: names[n % groups], sent))
        )
    )
    client.start()
    wait_for(lambda: _established(server) >= waiting_consumers, "all have connected", timeout=60)
    assert _threads(server.popen.pid) < 40
    connections = db.execute(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE 'custody%' "
    ).fetchone()[0]
    # the pool, the one that listens, the one that sends hints; and this test's own, which may send hints too
    assert connections <= 10 + 2 + 2
    c.publish_many("orders", list(range(waiting_consumers // groups)))
    client.join(120)
    leases = [json.loads(body) for body in answers]
    assert len(leases) == waiting_consumers
    for name in names:
        mine = [lease for number, lease in enumerate(leases) if names[number % groups] == name]
        received = [message["payload"] for lease in mine for message in lease["messages"]]
        assert sorted(received) == list(range(waiting_consumers // groups))
    assert server.stop() == 0


def _established(server: Process) -> int:
    """How many sockets the server has open."""
    found = 0
    for entry in Path(f"/proc/{server.popen.pid}/fd").iterdir():
        with suppress(OSError):  # closed while we looked
            found += os.readlink(entry).startswith("socket:")
    return found


def _threads(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


def test_a_line_that_nobody_is_in_is_forgotten(c: custody.Custody, http_: Http) -> None:
    c.create_topic("orders")
    for number in range(20):
        http_.get(f"/messages/orders?group=nobody{number}")
        http_.get("/messages/orders?wait=5ms")
        http_.get("/messages/orders/0")
    assert http_.state.long_polls._lines == {}


def test_a_database_that_is_away_is_told_to_all_who_do_not_wait(
    c: custody.Custody, http_: Http, db: psycopg.Connection
) -> None:
    """More of them than one claim serves."""
    c.create_topic("orders")
    c.create_group("orders", "g")
    answers: list[Response] = []
    with psycopg.connect(c.database_url) as holder:
        holder.execute("LOCK TABLE custody.frontiers IN ACCESS EXCLUSIVE MODE")
        threads = [
            threading.Thread(target=lambda: answers.append(http_.get("/messages/orders?group=g"))) for _ in range(60)
        ]
        for thread in threads:
            thread.start()
        wait_for(
            lambda: len(http_.state.long_polls._lines[long_polls.Place("orders", "g", None)].waiters) == 60,
            "all are in the line",
        )
        ended = (
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() "
            "AND application_name = 'custody' AND wait_event_type = 'Lock'"
        )
        wait_for(lambda: db.execute(ended).fetchall(), "the claim of the first is under way")
        wait_for(lambda: len(answers) == 60, "everybody has been told")
        holder.rollback()
    for thread in threads:
        thread.join(20)
    assert [(answer.status, answer.code) for answer in answers] == [(503, "database_unavailable")] * 60


def test_a_poll_whose_time_is_over_waits_quietly_for_its_first_claim(
    c: custody.Custody, http_: Http, monkeypatch: pytest.MonkeyPatch
) -> None:
    c.create_topic("orders")
    c.create_group("orders", "g")
    ended: list[object] = []
    real = type(http_.state.long_polls)._over

    def counted(*arguments: object) -> None:
        ended.append(arguments)
        real(*arguments)

    monkeypatch.setattr(type(http_.state.long_polls), "_over", counted)
    with psycopg.connect(c.database_url) as holder:
        holder.execute("LOCK TABLE custody.frontiers IN ACCESS EXCLUSIVE MODE")
        polls = [Poll(http_, "/messages/orders?group=g&wait=10ms") for _ in range(3)]
        wait_for(lambda: len(ended) >= 3, "their time is over")
        until = time.monotonic() + 0.2
        wait_for(lambda: time.monotonic() > until, "some time has passed")
        assert all(poll.answer is None for poll in polls)
        holder.rollback()
    assert [poll.messages for poll in polls] == [[], [], []]
    assert len(ended) == 3


def test_whoever_does_not_wait_is_answered_while_others_are_woken(c: custody.Custody, http_: Http) -> None:
    c.create_topic("orders", partitions=2)
    c.create_group("orders", "g")
    over = threading.Event()

    def publish() -> None:
        while not over.is_set():
            c.publish("orders", 1, partition=1)

    busy = threading.Thread(target=publish)
    busy.start()
    try:
        began = time.monotonic()
        for _ in range(10):
            assert http_.get("/messages/orders/0?group=g", timeout=5).json["messages"] == []
        assert time.monotonic() - began < 5
    finally:
        over.set()
        busy.join(10)


@pytest.mark.req("G14")
def test_leases_are_extended_and_the_server_is_watched_while_operators_are_held_up(
    c: custody.Custody, http_: Http, database_url: str
) -> None:
    c.create_topic("orders")
    c.create_topic("other")
    for topic in ("orders", "other"):
        c.create_group(topic, "g")
    c.publish("orders", 1)
    lease = http_.get("/messages/orders?group=g").json["lease_id"]
    with psycopg.connect(database_url) as holder:
        holder.execute(
            "SELECT FROM custody.groups g JOIN custody.topics t USING (topic_id) WHERE t.name = 'other' FOR UPDATE OF g"
        )
        held = [
            threading.Thread(target=lambda: http_.post("/topics/other/groups/g/pause", timeout=30)) for _ in range(4)
        ]
        for one in held:
            one.start()
        wait_for(lambda: http_.state.threads.slow._work_queue.qsize() > 0, "the operators have taken all their threads")
        body = {"lease_id": lease, "timeout_seconds": 60}
        assert http_.post("/messages/extend-visibility", body, timeout=5).status == 200
        assert http_.post("/messages/nack", {"lease_id": lease}, timeout=5).json["settled"] == 1
        assert http_.get("/readyz", timeout=5).status == 200
        assert b"custody_up 1.0" in http_.get("/metrics", timeout=10).body
        holder.rollback()
    for one in held:
        one.join(20)


@pytest.mark.req("G20")
def test_wakeups_of_a_topic_that_is_not_there(http_: Http) -> None:
    answer = http_.get("/topics/nowhere/wakeups?wait=20s", timeout=5)
    assert (answer.status, answer.code) == (404, "topic_not_found")
