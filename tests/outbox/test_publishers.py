"""The publishers: each keeps the contract that any publisher has to keep, and a few promises of its own."""

from __future__ import annotations

import io
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import msgspec
import psycopg
import pytest
from tests.http.conftest import served
from tests.outbox.conftest import rounds
from tests.outbox.test_webhook import answering
from tests.outbox.web_service import Service

import custody
from custody.errors import CustodyError, PublisherUnavailable, PublishFailed, PublishRefused
from custody.model import codec
from custody.relay import (
    CustodyPublisher,
    Publisher,
    Relay,
    StdoutPublisher,
    WebhookPublisher,
    custody_publisher,
    registry,
)
from custody.testing.publishers import Arrived, PublisherContract, event

pytestmark = pytest.mark.req("O9")


class WebhookDestination:
    def __init__(self, service: Service) -> None:
        self.service = service
        self.failed = 0

    def publisher(self) -> Publisher:
        return WebhookPublisher(self.service.url, allow_networks=["127.0.0.1"])

    def name(self) -> str:
        return self.service.url

    def arrived(self) -> Sequence[Arrived]:
        return [
            Arrived(headers["X-Custody-Event-Id"], body, headers)
            for _, _, headers, body in self.service.requests[self.failed :]
        ]

    def refuse(self, times: int) -> None:
        self.failed = len(self.service.requests) + times
        self.service.answers += [500] * times

    def attempts(self) -> int:
        return len(self.service.requests)

    def unreachable(self) -> Publisher | None:
        return WebhookPublisher("http://127.0.0.1:1/", allow_networks=["127.0.0.1"])


class TestWebhook(PublisherContract):
    @pytest.fixture
    def destination(self, service: Service) -> WebhookDestination:
        return WebhookDestination(service)


class StdoutDestination:
    def __init__(self) -> None:
        self.stream = Stream()

    def publisher(self) -> Publisher:
        return StdoutPublisher(self.stream)

    def name(self) -> str:
        return "stdout:"

    def arrived(self) -> Sequence[Arrived]:
        found = []
        for line in self.stream.getvalue().splitlines():
            document = msgspec.json.decode(line, type=dict[str, msgspec.Raw])
            if "payload_base64" in document:
                data = msgspec.json.decode(document["payload_base64"], type=bytes)
            elif (raw := bytes(document["payload"])).startswith(b'"'):
                data = msgspec.json.decode(raw, type=str).encode()
            else:
                data = raw
            named = msgspec.json.decode(document["headers"], type=dict[str, str])
            found.append(Arrived(msgspec.json.decode(document["event_id"], type=str), data, named))
        return found

    def refuse(self, times: int) -> None:
        self.stream.failing = times

    def attempts(self) -> int:
        return self.stream.attempts

    def unreachable(self) -> Publisher | None:
        return None


class Stream(io.StringIO):
    failing = 0
    attempts = 0

    def write(self, text: str) -> int:
        if text != "\n":
            self.attempts += 1
        if self.failing:
            self.failing -= 1
            raise OSError("the disk is full")
        return super().write(text)


class TestStdout(PublisherContract):
    @pytest.fixture
    def destination(self) -> StdoutDestination:
        return StdoutDestination()

    def test_json_stays_as_it_was_written(self, destination: StdoutDestination) -> None:
        """Numbers that Python would round or write in another way, and spaces; one event is one line all the same."""
        for written in (b'{"a": 1.50, "b": 123456789012345678901234567890e3}', b'{\n  "a": "b\\n",\r\n "c": 1\n}'):
            destination.publisher().publish(event("stdout:", 1, kind="j", data=written))
            assert destination.arrived()[-1].data == written.replace(b"\r", b" ").replace(b"\n", b" ")


class CustodyDestination:
    """A topic of another database; a trigger of ours makes it fail."""

    def __init__(self, c: custody.Custody, db: psycopg.Connection[Any]) -> None:
        self.c, self.db = c, db
        c.create_topic("orders")
        db.execute("CREATE SEQUENCE public.refusals; CREATE SEQUENCE public.attempts")
        db.execute("SELECT setval('public.refusals', 1000)")
        db.execute(
            "CREATE FUNCTION public.refusing() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
            "PERFORM nextval('public.attempts'); "
            "IF nextval('public.refusals') < 1000 THEN PERFORM setval('public.refusals', 1000); "
            "RAISE 'refused' USING ERRCODE = 'raise_exception'; END IF; RETURN NULL; END $$"
        )
        db.execute(
            "CREATE TRIGGER refusing AFTER INSERT ON custody.outbox_received FOR EACH STATEMENT "
            "EXECUTE FUNCTION public.refusing()"
        )

    def publisher(self) -> Publisher:
        return CustodyPublisher(self.c.database_url)

    def name(self) -> str:
        return "elsewhere:orders"

    def arrived(self) -> Sequence[Arrived]:
        return [
            Arrived(m.headers["x-custody-event-id"], codec.encode(m.payload)[1], m.headers)
            for m in self.c.read("orders", max_messages=1000)
        ]

    def refuse(self, times: int) -> None:
        assert times == 1
        self.db.execute("SELECT setval('public.refusals', 1)")

    def attempts(self) -> int:
        row = self.db.execute("SELECT last_value - (NOT is_called)::int FROM public.attempts").fetchone()
        assert row is not None
        return int(row[0])

    def unreachable(self) -> Publisher | None:
        return CustodyPublisher("postgresql://nobody@127.0.0.1:1/none")


class TestCustodyElsewhere(PublisherContract):
    @pytest.fixture
    def destination(self, c: custody.Custody, db: psycopg.Connection[Any]) -> CustodyDestination:
        return CustodyDestination(c, db)


class ServedDestination(CustodyDestination):
    """The same, by way of its server."""

    def __init__(self, c: custody.Custody, db: psycopg.Connection[Any], url: str) -> None:
        super().__init__(c, db)
        self.url = url

    def publisher(self) -> Publisher:
        return CustodyPublisher(self.url)

    def unreachable(self) -> Publisher | None:
        return CustodyPublisher("http://127.0.0.1:1")


class TestCustodyServer(PublisherContract):
    @pytest.fixture
    def destination(self, c: custody.Custody, db: psycopg.Connection[Any]) -> Iterator[ServedDestination]:
        with served(c) as server:
            yield ServedDestination(c, db, server.url)


@pytest.fixture
def target(c: custody.Custody) -> custody.Custody:
    c.create_topic("orders", partitions=3)
    return c


def written(url: str, count: int) -> None:
    with psycopg.connect(url) as connection:
        for n in range(count):
            custody.outbox.write(
                connection,
                event_type="placed",
                payload={"n": n},
                destination="elsewhere:orders",
                ordering_key=f"k{n % 5}",
            )


def everything(c: custody.Custody) -> list[Any]:
    return [m for p in range(3) for m in c.read("orders", p, max_messages=10_000)]


@pytest.mark.core
@pytest.mark.req("O9")
def test_a_database_of_this_machine_that_an_event_names_has_to_be_allowed(target: custody.Custody) -> None:
    sent = event(f"custody+{target.database_url}#orders", {"n": 1})
    with pytest.raises(PublishRefused, match="allow_networks"):
        CustodyPublisher().publish(sent)
    assert everything(target) == []
    publisher = CustodyPublisher(allow_networks=["127.0.0.0/8", "::1"])
    publisher.publish(sent)
    publisher.close()
    assert [message.payload for message in everything(target)] == [{"n": 1}]


def unsaid(outbox: psycopg.Connection[Any]) -> None:
    """All is as after the lease of a relay that published everything and never said so. The table refuses that."""
    with outbox.transaction():
        outbox.execute("SELECT custody.outbox_replay('{PUBLISHED}')")
        outbox.execute("ALTER TABLE custody.outbox DISABLE TRIGGER outbox_moves")
        outbox.execute("UPDATE custody.outbox SET replays = 0")
        outbox.execute("ALTER TABLE custody.outbox ENABLE TRIGGER outbox_moves")


@pytest.mark.core
@pytest.mark.req("O8")
def test_what_is_brought_twice_to_another_custody_arrives_once(alone_url: str, target: custody.Custody) -> None:
    """As if the relay had died between its publish and its settle, with the whole batch."""
    written(alone_url, 20)
    with psycopg.connect(alone_url, autocommit=True) as outbox:
        for _ in range(2):
            relay = Relay(alone_url, {"elsewhere": CustodyPublisher(target.database_url)}, batch=7, lease="1h")
            rounds(relay)
            relay.close()
            unsaid(outbox)
    messages = everything(target)
    assert sorted(m.payload["n"] for m in messages) == list(range(20))
    for m in messages:
        assert m.key == f"k{m.payload['n'] % 5}"
        assert m.headers["x-custody-event-type"] == "placed"
    for key in range(5):
        assert [m.payload["n"] for m in messages if m.key == f"k{key}"] == list(range(key, 20, 5))


@pytest.mark.core
@pytest.mark.req("O8")
def test_what_is_named_twice_in_one_request_arrives_once(target: custody.Custody) -> None:
    one, two = uuid4(), uuid4()

    def of(event_id: UUID, replay: int, payload: str) -> tuple[UUID, int, custody.Outgoing]:
        return event_id, replay, custody.Outgoing(payload, key="k")

    assert target.receive_events("orders", [of(two, 0, "b"), of(one, 0, "a"), of(two, 0, "b"), of(one, 0, "a")]) == 2
    assert [m.payload for m in everything(target)] == ["b", "a"], "another number or order"
    # a replay is another one, and does not bring along the one that has come before
    assert target.receive_events("orders", [of(one, 0, "a"), of(one, 1, "again"), of(two, 0, "b")]) == 1
    assert [m.payload for m in everything(target)] == ["b", "a", "again"]


@pytest.mark.core
def test_a_replay_on_purpose_arrives_again(alone_url: str, target: custody.Custody) -> None:
    written(alone_url, 3)
    for _ in range(2):
        relay = Relay(alone_url, {"elsewhere": CustodyPublisher(target.database_url, "orders")})
        rounds(relay)
        relay.close()
        with custody.outbox.Outbox(alone_url) as outbox:
            assert len(outbox.replay(states=["PUBLISHED"])) == 3
    assert sorted(m.payload["n"] for m in everything(target)) == [0, 0, 1, 1, 2, 2]


def test_a_topic_that_is_not_there_is_an_outage(alone_url: str, c: custody.Custody) -> None:
    written(alone_url, 1)
    relay = Relay(alone_url, {"elsewhere": f"custody+{c.database_url}"}, outage_backoff=custody.Constant("0s"))
    relay.run_once()
    assert relay.outages.down == ["elsewhere:orders"]
    c.create_topic("orders")
    rounds(relay)
    assert [m.payload for m in c.read("orders")] == [{"n": 0}]
    relay.close()


def test_which_events_came_is_forgotten_after_a_while(alone_url: str, target: custody.Custody) -> None:
    written(alone_url, 2)
    relay = Relay(alone_url, {"elsewhere": CustodyPublisher(target.database_url)})
    rounds(relay)
    relay.close()
    with custody.outbox.Outbox(target.database_url) as there:
        assert there.forget("1h") == 0
        assert there.forget("0s") == 2


PLUGIN = """
from custody.relay import Publisher
class Kafka(Publisher):
    def publish(self, event):
        print("kafka got", event.payload, "for", event.address)
"""


def test_a_publisher_of_another_package_is_found_by_its_entry_point(alone_url: str, tmp_path: Path) -> None:
    (tmp_path / "plugged.py").write_text(PLUGIN)
    info = tmp_path / "plugged-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugged\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[custody.publishers]\nkafka = plugged:Kafka\n")
    with psycopg.connect(alone_url) as connection:
        custody.outbox.write(connection, event_type="e", payload=7, destination="kafka:orders")
    program = f"from custody.relay import Relay; Relay({alone_url!r}).drain('20s')"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "kafka got 7 for orders\n", done.stderr


def test_a_publisher_of_another_package_that_is_broken_is_an_outage_of_its_own_destinations(
    alone_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        name = "kafka"

        def load(self) -> Any:
            raise ImportError("no module named kafka")

    monkeypatch.setattr(registry, "entry_points", lambda **_: [Broken()])
    seen: list[Any] = []
    with psycopg.connect(alone_url) as connection:
        custody.outbox.write(connection, event_type="e", payload=1, destination="kafka:orders")
        custody.outbox.write(connection, event_type="e", payload=2, destination="mine:")
    relay = Relay(alone_url, {"mine": lambda event: seen.append(event.payload)})
    relay.run_once()
    relay.close()
    assert (seen, relay.outages.down) == ([2], ["kafka:orders"])
    with custody.outbox.Outbox(alone_url) as outbox:
        (event,) = outbox.events(destination="kafka:orders")
    assert (event.attempts, event.last_error) == (0, "the publisher kafka cannot be made: no module named kafka")


@pytest.mark.core
def test_a_database_that_only_reads_is_an_outage(c: custody.Custody, db: psycopg.Connection[Any]) -> None:
    """A standby, or a primary that became one."""
    c.create_topic("orders")
    url = f"{c.database_url}{'&' if '?' in c.database_url else '?'}options=-c%20default_transaction_read_only%3Don"
    publisher = CustodyPublisher(url)
    with pytest.raises(PublisherUnavailable, match="read-only"):
        publisher.publish(event("elsewhere:orders", 1))
    publisher.close()


@pytest.mark.core
def test_a_database_that_keeps_the_relay_waiting_is_an_outage(
    target: custody.Custody, db: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(custody_publisher, "TIMEOUT", 0.2)
    publisher = CustodyPublisher(target.database_url)
    with db.transaction():
        db.execute("LOCK TABLE custody.outbox_received")
        with pytest.raises(PublisherUnavailable, match="timeout"):
            publisher.publish(event("elsewhere:orders", 1))
    publisher.publish(event("elsewhere:orders", 1))
    publisher.close()
    assert [m.payload for m in everything(target)] == [1]


@pytest.mark.core
@pytest.mark.req("O6")
def test_an_event_that_a_database_does_not_take_is_refused(target: custody.Custody) -> None:
    publisher = CustodyPublisher(target.database_url)
    with pytest.raises(PublishRefused, match="at most 2,000 bytes"):
        publisher.publish(event("elsewhere:orders", 1, ordering_key="k" * 2001))
    publisher.close()


@pytest.mark.core
def test_what_is_brought_twice_to_a_server_arrives_once(alone_url: str, target: custody.Custody) -> None:
    """As if the relay had died between its publish and its settle, with the whole batch."""
    written(alone_url, 20)
    with served(target) as server, psycopg.connect(alone_url, autocommit=True) as outbox:
        for _ in range(2):
            relay = Relay(alone_url, {"elsewhere": f"custody+{server.url}"}, batch=7, lease="1h")
            rounds(relay)
            relay.close()
            unsaid(outbox)
    messages = everything(target)
    assert sorted(m.payload["n"] for m in messages) == list(range(20))
    for key in range(5):
        assert [m.payload["n"] for m in messages if m.key == f"k{key}"] == list(range(key, 20, 5))


def test_a_topic_that_a_server_does_not_have_is_an_outage(c: custody.Custody) -> None:
    with served(c) as server:
        publisher = CustodyPublisher(server.url)
        with pytest.raises(PublisherUnavailable, match="topic_not_found"):
            publisher.publish(event("elsewhere:orders", 1))
        c.create_topic("orders")
        with pytest.raises(PublishRefused, match="NUL character"):
            publisher.publish(event("elsewhere:orders", 1, ordering_key="a\0b"))
        publisher.publish(event("elsewhere:orders", 1))
        assert c.topic("orders").message_count == 1


@pytest.mark.core
@pytest.mark.req("O6")
def test_an_event_that_a_server_cannot_read_dies_alone(alone_url: str, target: custody.Custody) -> None:
    """Nested so deep that it is JSON to PostgreSQL, and none to the server's reader."""
    deep = b"[" * 2000 + b"]" * 2000
    with served(target) as server, psycopg.connect(alone_url, autocommit=True) as mine:
        for data in (b"1", deep, b"3"):
            mine.execute("SELECT custody.outbox_add('e', 'j', %s, 'elsewhere:orders')", [data])
        relay = Relay(alone_url, {"elsewhere": f"custody+{server.url}"}, outage_backoff=custody.Constant("1h"))
        rounds(relay)
        relay.close()
        found = mine.execute("SELECT status, coalesce(last_error, '') FROM custody.outbox ORDER BY id").fetchall()
    assert [status for status, _ in found] == ["PUBLISHED", "DEAD", "PUBLISHED"]
    assert "invalid_payload" in found[1][1]
    assert sorted(m.payload for m in everything(target)) == [1, 3]


def test_a_key_goes_to_the_server_that_it_is_for_and_to_no_other(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever writes events chooses destinations: a server of theirs must not be sent the relay's key."""
    monkeypatch.setenv("CUSTODY_API_KEY", "s3cret")
    url = service.url.partition("/hook")[0]
    service.default, service.body = 200, b'{"count": 1}'
    CustodyPublisher(allow_networks=["127.0.0.1"]).publish(event(f"custody+{url}#orders", 1))
    CustodyPublisher(url, allow_networks=["127.0.0.1"]).publish(event(f"custody+{url}/other#orders", 1))
    CustodyPublisher(url).publish(event("warehouse:orders", 1))
    CustodyPublisher(url, api_key="given").publish(event("warehouse:orders", 1))
    CustodyPublisher(url.replace("://", "://mine@")).publish(event("warehouse:orders", 1))
    keys = [headers.get("Authorization") for _, _, headers, _ in service.requests]
    assert keys == [None, None, "Bearer s3cret", "Bearer given", "Bearer mine"]


@pytest.mark.req("O6", "O12")
@pytest.mark.parametrize(
    ("status", "body", "expected", "busy"),
    [
        (429, b"too many", PublisherUnavailable, True),
        (429, b'{"error": {"code": "queue_full", "message": "full", "request_id": "1"}}', PublisherUnavailable, True),
        (503, b"", PublisherUnavailable, False),
        (403, b'{"error": {"code": "forbidden", "message": "no", "request_id": "1"}}', PublisherUnavailable, False),
        (302, b"", PublisherUnavailable, False),
        (500, b'{"error": {"code": "internal_error", "message": "oh", "request_id": "1"}}', PublishFailed, False),
        (413, b'{"error": {"code": "too_large", "message": "large", "request_id": "1"}}', PublishRefused, False),
    ],
)
def test_what_a_server_answers_tells_an_outage_from_a_failure_and_a_refusal(
    service: Service, status: int, body: bytes, expected: type[CustodyError], busy: bool
) -> None:
    service.default, service.body, service.headers = status, body, {"Retry-After": "7200"}
    publisher = CustodyPublisher(service.url.partition("/hook")[0])
    with pytest.raises(CustodyError) as raised:
        publisher.publish(event("elsewhere:orders", 1))
    publisher.close()
    assert type(raised.value) is expected
    assert len(service.requests) == 1, "how often it is tried is for the relay to decide"
    assert getattr(raised.value, "busy", False) is busy
    if expected is not PublishRefused:
        assert raised.value.retry_after == 3600, "so long at most, whatever the server says"


def test_the_time_of_a_request_to_a_server_is_for_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that sends a byte now and then would hold a thread for ever. The second request uses the first one's
    connection, and has as much time again."""
    monkeypatch.setattr(custody_publisher, "TIMEOUT", 1.0)
    ended = threading.Event()

    def drip(connection: socket.socket) -> None:
        ended.wait(0.7)
        connection.sendall(b'HTTP/1.1 200 OK\r\nContent-Length: 12\r\n\r\n{"count": 1}')
        connection.recv(65536)
        ended.wait(0.7)
        connection.sendall(b'HTTP/1.1 200 OK\r\nContent-Length: 12\r\n\r\n{"count": 1}')
        connection.recv(65536)
        for byte in b"HTTP/1.1 200 OK\r\n" * 10:
            connection.sendall(bytes([byte]))
            if ended.wait(0.1):
                return

    with answering(drip) as url:
        publisher = CustodyPublisher(url)
        for _ in range(2):
            publisher.publish(event("elsewhere:orders", 1))
        began = time.monotonic()
        with pytest.raises(PublisherUnavailable, match="Timeout"):
            publisher.publish(event("elsewhere:orders", 1))
        assert time.monotonic() - began < 8
        ended.set()
        publisher.close()


def test_a_password_of_the_relay_goes_to_no_server_that_an_event_names(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A server of the writer's own that asks for the password in plain text."""
    (tmp_path / "pgpass").write_text("*:*:*:*:s3cret\n")
    (tmp_path / "pgpass").chmod(0o600)
    monkeypatch.setenv("PGPASSFILE", str(tmp_path / "pgpass"))
    monkeypatch.setenv("PGPASSWORD", "s3cret")
    with asking_server() as (port, told):
        own = f"postgresql://u@127.0.0.1:{port}/d?sslmode=disable&gssencmode=disable"
        for publisher, destination in (
            (CustodyPublisher(allow_networks=["127.0.0.1"]), f"custody+{own}#t"),
            (CustodyPublisher(allow_networks=["127.0.0.1"]), f"custody+{own.replace('u@', 'u:theirs@')}#t"),
            (CustodyPublisher(own), "own:t"),
        ):
            with pytest.raises(PublisherUnavailable):
                publisher.publish(event(destination, 1))
    assert told == ["theirs", "s3cret"]


@contextmanager
def asking_server() -> Iterator[tuple[int, list[str]]]:
    """Speaks as much of PostgreSQL's protocol as it takes to be told passwords, which it keeps."""
    told: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection:
                        connection.recv(4096)
                        connection.sendall(b"R\0\0\0\x08\0\0\0\x03")  # AuthenticationCleartextPassword
                        answer = connection.recv(4096)
                        if answer[:1] == b"p":
                            told.append(answer[5:-1].decode())

        thread = threading.Thread(target=accept)
        thread.start()
        yield listener.getsockname()[1], told
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
