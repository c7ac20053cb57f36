"""Opening a client: which URL, which key, which certificates, and what it cannot do."""

from __future__ import annotations

import logging
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
from tests.http.conftest import Http
from tests.remote.cutting import Proxy
from tests.waiting import wait_for

import custody
from custody import config
from custody.address import Address
from custody.cli import run
from custody.engine import Custody
from custody.errors import (
    CustodyError,
    DatabaseUnavailable,
    InsecureKey,
    InvalidArgument,
    InvalidConfig,
    NeedsDatabase,
    PublisherUnavailable,
)
from custody.http import Server, ServerSettings
from custody.relay import CustodyPublisher
from custody.remote import RemoteCustody
from custody.testing.publishers import event
from custody.wire.verb import declared

pytestmark = pytest.mark.core


def test_the_environment_and_the_file_may_name_a_server(
    server: Http, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "custody.yaml").write_text(f"database: {server.url}\n")
    with custody.connect() as c:
        assert (isinstance(c, RemoteCustody), c.topics()) == (True, [])
    (tmp_path / "custody.yaml").unlink()
    monkeypatch.setenv("CUSTODY_DATABASE", server.url + "/")
    with custody.connect() as c:
        assert repr(c) == f"<Custody at {server.url}>"


def test_a_server_that_is_not_there_is_said_at_once() -> None:
    with pytest.raises(DatabaseUnavailable, match=r"127\.0\.0\.1:1"):
        custody.connect("http://127.0.0.1:1")


@pytest.mark.parametrize("url", ["http://", "http://host:port", "http://s3cret@host?x=1", "http://s3cret@[::1"])
def test_what_is_no_server_is_refused_without_its_key(url: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        custody.connect(url)
    assert "s3cret" not in str(refused.value)


def test_what_is_for_a_server_is_refused_elsewhere(server: Http, database_url: str) -> None:
    with pytest.raises(InvalidArgument):
        custody.connect(database_url, api_key="k")
    with pytest.raises(InvalidArgument):
        custody.connect(server.url, clock=lambda: None)  # type: ignore[arg-type,return-value]


@pytest.mark.req("G19")
def test_a_key_is_sent_and_never_shown(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    host = proxy.url.removeprefix("http://")
    monkeypatch.setenv("CUSTODY_API_KEY", "of-the-environment")

    def sent() -> str | None:
        return proxy.requests[-1][2].get("Authorization")

    for url, key, wanted in (
        (f"http://{host}", None, "of-the-environment"),
        (f"http://s3cret%2F@{host}", None, "s3cret/"),
        (f"http://:s3cret@{host}", None, "s3cret"),
        (f"http://other@{host}", "s3cret", "s3cret"),
    ):
        with custody.connect(url, api_key=key, retry_for="0s") as c:
            assert sent() == f"Bearer {wanted}"
            with pytest.raises(CustodyError) as refused:
                c.topic("nothing")
            proxy.lose("GET /topics", "before")
            with pytest.raises(DatabaseUnavailable) as lost:
                c.topics()
            shown = f"{c!r} {vars(c)} {refused.value} {lost.value} {lost.value.__cause__}"
            assert wanted not in shown
    assert "s3cret" not in caplog.text


@pytest.mark.req("G19")
def test_a_key_goes_no_further_than_this_machine_without_tls(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("0.0.0.0", 0)) as listening:  # nobody may so much as connect
        listening.setblocking(False)
        port = listening.getsockname()[1]
        for host in (socket.gethostname(), "192.0.2.1", "[2001:db8::1]", "localhost.example.com"):
            for url, key in ((f"http://{host}:{port}", "s3cret"), (f"http://s3cret@{host}:{port}", None)):
                with pytest.raises(InsecureKey, match="allow_insecure=True") as refused:
                    custody.connect(url, api_key=key, retry_for="0s")
                assert "s3cret" not in str(refused.value)
        monkeypatch.setenv("CUSTODY_API_KEY", "s3cret")
        with pytest.raises(InsecureKey):
            custody.connect(f"http://192.0.2.1:{port}")
        assert run(["--database", f"http://192.0.2.1:{port}", "topics", "list"]) == 1
        assert "CUSTODY_ALLOW_INSECURE" in capsys.readouterr().err
        publisher = CustodyPublisher(f"http://192.0.2.1:{port}", "orders")
        with pytest.raises(PublisherUnavailable, match="is not sent"):
            publisher.publish(event("warehouse:orders", 1))
        with pytest.raises(BlockingIOError):
            listening.accept()
    with pytest.raises(InvalidArgument, match="allow_insecure"):
        custody.connect("postgresql://localhost", allow_insecure=True)


@pytest.mark.req("G19")
def test_a_key_goes_anywhere_if_that_is_said(monkeypatch: pytest.MonkeyPatch, server: Http) -> None:
    other = server.url.replace("127.0.0.1", "[::ffff:127.0.0.1]")
    found = Address.of(other, key="s3cret", allow_insecure=True)
    assert (found.url, found.key) == (other, "s3cret")
    for url in ("http://127.0.0.1:1", "http://localhost", "http://[::1]:2", "https://example.com"):
        assert Address.of(url, key="s3cret").key == "s3cret"
    assert Address.of("http://example.com").key is None
    monkeypatch.setenv("CUSTODY_ALLOW_INSECURE", "1")
    assert config.load().allow_insecure
    monkeypatch.setenv("CUSTODY_ALLOW_INSECURE", "perhaps")
    with pytest.raises(InvalidConfig, match="1 or 0"):
        config.load()


def test_the_worker_is_named(c: custody.Custody, server: Http, orders: Callable[[int], None]) -> None:
    orders(1)
    with custody.connect(server.url, worker="Müller 7") as remote:
        remote.claim("orders", "stock").ack()
    assert [entry.worker for entry in c.trace("orders", 0, 0)] == ["M_ller_7", "M_ller_7"]


def test_each_thread_has_a_connection_that_is_kept(server: Http, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    with custody.connect(server.url, pool_size=2) as remote:
        together = threading.Barrier(8)

        def ask() -> None:
            for _ in range(5):
                together.wait(20)
                remote.topics()

        with ThreadPoolExecutor(8) as threads:
            for asked in [threads.submit(ask) for _ in range(8)]:
                asked.result(60)
        pools = remote._transport._pool.pools  # type: ignore[attr-defined]
        (opened,) = [pools[key].num_connections for key in pools.keys()]  # noqa: SIM118
    assert opened <= 8
    assert caplog.text == ""


def test_what_needs_the_database_says_so(c: custody.Custody, remote: custody.Custody, database_url: str) -> None:
    c.create_topic("orders")
    c.create_group("orders", "g")
    c.publish("orders", 1)
    lease = remote.claim("orders", "g")
    for refused in (
        lambda: remote.database_url,
        lambda: remote.drive("orders", "g"),
        lambda: remote.figures("orders", "g"),
        lambda: remote.overview(),
        lambda: custody.relay.Relay(remote),  # type: ignore[arg-type]
    ):
        with pytest.raises(NeedsDatabase, match="postgresql"):
            refused()
    with psycopg.connect(database_url) as connection, pytest.raises(NeedsDatabase, match="once"):
        lease.ack(connection=connection)
    assert lease.ack().settled == 1


def test_every_verb_of_the_direct_connection_is_the_clients_own_or_refused() -> None:
    """A verb that is added there, and neither declared nor written by hand here, is answered with `needs_database`."""
    at_the_database = {"create_api_key", "api_keys", "revoke_api_key", "overview", "grants", "revoke_grants", "tick"}
    of_pipelines = {"drive", "driver_verbs", "figures", "pipelines"}
    verbs = {name for name in dir(Custody) if not name.startswith("_")}
    parts = [kind for kind in RemoteCustody.__mro__[1:] if kind.__module__.startswith("custody.remote")]
    by_hand = {name for kind in parts for name in vars(kind)}
    composed = {name for name in verbs if hasattr(getattr(Custody, name), "__composed__")}
    refused = verbs - by_hand - declared(Custody).keys() - composed
    assert refused == at_the_database | of_pipelines
    for name in refused:
        assert getattr(RemoteCustody, name) is not getattr(Custody, name)


@contextmanager
def served_tls(c: custody.Custody, cert: Path, key: Path) -> Iterator[str]:
    """A server with a certificate, in a thread."""
    server = Server(c, ServerSettings(port=0, tls_cert=cert, tls_key=key))
    thread = threading.Thread(target=server.run)
    thread.start()

    def ready() -> bool:
        try:
            custody.connect(server.url, ca=cert).close()
        except DatabaseUnavailable:
            return False
        return True

    try:
        wait_for(ready, "the server answers")
        yield server.url
    finally:
        server.stop()
        thread.join(30)


@pytest.mark.req("G19")
def test_a_certificate_is_checked(c: custody.Custody, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl to make a certificate with")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    name = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"]
    making = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *name]
    subprocess.run([*making, "-keyout", str(key), "-out", str(cert)], check=True, capture_output=True)
    with served_tls(c, cert, key) as url:
        with pytest.raises(InvalidConfig, match="not trusted"):
            custody.connect(url)
        with custody.connect(url, ca=cert) as remote:
            assert remote.create_topic("orders").name == "orders"
        monkeypatch.setenv("CUSTODY_CA", str(cert))
        with custody.connect(url) as remote:
            assert [topic.name for topic in remote.topics()] == ["orders"]
    with pytest.raises(InvalidConfig, match="certificates"):
        custody.connect("https://127.0.0.1:1", ca=key)
