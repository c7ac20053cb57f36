"""Who can reach a server: beyond this machine only with keys, and with TLS by certificate files."""

from __future__ import annotations

import http.client
import shutil
import socket
import ssl
import subprocess
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from tests.cli.conftest import Run, cli, environment  # noqa: F401  # fixtures
from tests.http.conftest import Process
from tests.waiting import wait_for

import custody
from custody.errors import InvalidConfig, KeysNeeded
from custody.http import Server, ServerSettings

pytestmark = pytest.mark.core


@pytest.mark.req("G19")
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "example.com"])
def test_beyond_this_machine_a_server_without_keys_does_not_start(c: custody.Custody, host: str) -> None:
    with pytest.raises(KeysNeeded, match="custody apikeys create"):
        Server(c, ServerSettings(host=host, port=0))


@pytest.mark.req("G19")
def test_expired_and_revoked_keys_do_not_count(c: custody.Custody, clock: Callable[[], object]) -> None:
    c.create_api_key("short", admin=["*"], expires="1h")
    c.create_api_key("gone", admin=["*"])
    c.revoke_api_key("gone")
    clock.move(3600)  # type: ignore[attr-defined]
    with pytest.raises(KeysNeeded):
        Server(c, ServerSettings(host="0.0.0.0", port=0))


@pytest.mark.req("G19")
def test_the_command_says_what_to_do(cli: Run) -> None:  # noqa: F811
    refused = cli("serve", "--host", "0.0.0.0", "--port", "0", "--json", code=1)
    assert refused.out == ""
    assert refused.error["code"] == "keys_needed"
    assert "custody apikeys create" in refused.error["remedy"]


@pytest.mark.req("G19")
def test_with_a_key_it_starts_warns_and_stays_closed_when_the_last_key_goes(
    c: custody.Custody, process: Callable[..., Process]
) -> None:
    key = {"Authorization": f"Bearer {c.create_api_key('shop', admin=['*']).secret}"}
    server = process("--host", "0.0.0.0")
    server.http.url = server.http.url.replace("0.0.0.0", "127.0.0.1")
    assert server.http.get("/topics").status == 401
    assert server.http.get("/topics", headers=key).status == 200
    # by any name: whoever has the key has not been sent by a page
    assert server.http.get("/topics", headers={**key, "Host": "custody.example.com"}).status == 200
    wait_for(lambda: "--tls-cert" in server.log.read_text(), "it warns that keys travel in the clear")
    c.revoke_api_key("shop")
    wait_for(lambda: server.http.get("/topics", headers=key).status == 401, "the revocation is noticed", timeout=8)
    assert server.http.get("/topics").status == 401
    assert server.stop() == 0


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 that signs itself, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl to make a certificate with")
    place = tmp_path_factory.mktemp("tls")
    cert, key = place / "cert.pem", place / "key.pem"
    subprocess.run(
        [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-nodes",
            "-days",
            "2",
            "-subj",
            "/CN=127.0.0.1",
            "-addext",
            "subjectAltName=IP:127.0.0.1",
            "-keyout",
            str(key),
            "-out",
            str(cert),
        ],
        check=True,
        capture_output=True,
    )
    return cert, key


def get(url: str, context: ssl.SSLContext, path: str, headers: dict[str, str]) -> int:
    connection = http.client.HTTPSConnection(urlsplit(url).netloc, context=context, timeout=10)
    try:
        connection.request("GET", path, headers=headers)
        return connection.getresponse().status
    finally:
        connection.close()


@pytest.mark.req("G19", "X5")
def test_https_with_certificate_files(
    c: custody.Custody, database_url: str, tmp_path: Path, certificate: tuple[Path, Path]
) -> None:
    cert, key = certificate
    shown = {"Authorization": f"Bearer {c.create_api_key('shop', admin=['*']).secret}"}
    server = Process(
        database_url,
        *("--host", "0.0.0.0", "--tls-cert", str(cert), "--tls-key", str(key)),
        *("--max-connections", "20", "--body-timeout", "2s"),
        cwd=tmp_path,
        ready=False,
    )
    try:
        url = server.http.url.replace("0.0.0.0", "127.0.0.1")
        assert url.startswith("https://")
        trusting = ssl.create_default_context(cafile=str(cert))
        wait_for(lambda: _answers(url, trusting), "the server answers")
        assert get(url, trusting, "/topics", shown) == 200
        assert get(url, trusting, "/topics", {}) == 401
        assert get(url, trusting, "/topics", {**shown, "Origin": url}) == 200, "its own origin is https"
        assert get(url, trusting, "/topics", {**shown, "Origin": url.replace("https", "http")}) == 403
        with pytest.raises(ssl.SSLCertVerificationError):
            get(url, ssl.create_default_context(), "/healthz", {})
        old = ssl.create_default_context(cafile=str(cert))
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        assert get(url, old, "/healthz", {}) == 200
        with ExitStack() as opened:
            crowd = []
            for number in range(30):  # who does not begin with TLS is counted, and given up
                found = urlsplit(url)
                crowd.append(opened.enter_context(socket.create_connection((found.hostname, found.port), timeout=20)))
                if number % 10 == 9:
                    assert get(url, trusting, "/topics", shown) == 200
            crowd[-2].sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
            for client in crowd:
                with suppress(ConnectionError):
                    assert client.recv(1) == b""
        assert get(url, trusting, "/topics", shown) == 200
        assert "--tls-cert" not in server.log.read_text(), "nothing to warn of"
    finally:
        assert server.stop() == 0
        assert server.popen.stdout is not None
        server.popen.stdout.close()


def _answers(url: str, context: ssl.SSLContext) -> bool:
    try:
        return get(url, context, "/healthz", {}) == 200
    except ConnectionError:
        return False


@pytest.mark.req("G19")
def test_bad_certificate_files_are_refused(c: custody.Custody, certificate: tuple[Path, Path], tmp_path: Path) -> None:
    cert, key = certificate
    missing, empty, locked = tmp_path / "missing.pem", tmp_path / "empty.pem", tmp_path / "locked.pem"
    empty.touch()
    subprocess.run(
        ["openssl", "ec", "-in", str(key), "-out", str(locked), "-aes128", "-passout", "pass:word"],
        check=True,
        capture_output=True,
    )
    for tls_cert, tls_key in (
        (missing, key),
        (cert, missing),
        (empty, key),
        (cert, empty),
        (key, cert),
        (cert, locked),
    ):
        with pytest.raises(InvalidConfig, match="PEM files") as refused:
            Server(c, ServerSettings(port=0, tls_cert=tls_cert, tls_key=tls_key))
        assert str(tls_cert) in str(refused.value)
    with pytest.raises(InvalidConfig, match="both"):
        ServerSettings(tls_cert=cert)


@pytest.mark.parametrize(
    "origin",
    [
        "*",
        "null",
        "example.com",
        "https://example.com/",
        "https://*.example.com",
        "ftp://a",
        "https://",
        "https://Example.com",
    ],
)
def test_an_origin_that_cannot_be_is_refused(origin: str) -> None:
    with pytest.raises(InvalidConfig, match="is not an origin"):
        ServerSettings(origins=(origin,))
