"""Calls need a key where there are keys; what was read of the database a few seconds ago tells whose it is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.conftest import Clock
from tests.http.conftest import Http
from tests.waiting import wait_for

import custody
from custody.engine.server_verbs import ServerVerbs
from custody.errors import DatabaseUnavailable, KeysNeeded, Unauthorized
from custody.http import Server, ServerSettings, keyring
from custody.http.keyring import Keyring
from custody.http.rights import Caller
from custody.verbs.apikeys import KnownKeys

pytestmark = pytest.mark.core


def bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


@pytest.mark.req("G19")
def test_with_a_key_in_the_database_calls_need_one(c: custody.Custody, serve: Callable[..., Http]) -> None:
    c.create_topic("orders")
    key = c.create_api_key("shop", admin=["*"]).secret
    http = serve()
    for path in ("/healthz", "/readyz", "/openapi.json", "/docs"):
        assert http.get(path).status == 200
    for headers in (
        {},
        bearer(""),
        bearer(key[:-1]),
        bearer(key[:-1] + "~"),
        {"Authorization": key},
        {"Authorization": f"Basic {key}"},
        {"X-Api-Key": key + "x"},
        {"Authorization": "Bearer \xff\xfe"},
    ):
        for method, path in (
            ("GET", "/topics"),
            ("POST", "/messages"),
            ("GET", "/nowhere"),
            ("GET", "/messages/orders"),
        ):
            refused = http(method, path, {} if method == "POST" else None, headers=headers)
            assert (refused.status, refused.code) == (401, "unauthorized")
            assert refused.headers["www-authenticate"].startswith("Bearer")
            assert "custody apikeys create" in refused.json["error"]["remedy"]
    for headers in (bearer(key), {"Authorization": f"bearer  {key} "}, {"X-Api-Key": key}):
        assert http.get("/topics", headers=headers).status == 200


@pytest.mark.req("G19")
def test_without_keys_this_machine_needs_none(c: custody.Custody, http_: Http) -> None:
    c.create_topic("orders")
    assert http_.get("/topics").status == 200
    assert http_.get("/topics", headers=bearer("cus_whatever")).status == 200


@pytest.mark.req("G19")
def test_a_new_key_works_at_once_and_a_revoked_one_not_for_long(
    c: custody.Custody, serve: Callable[..., Http], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keyring, "FRESH", 0.2)
    monkeypatch.setattr(keyring, "RENEWED", 0.1)
    monkeypatch.setattr(keyring, "AGAIN", 0.0)
    boss = c.create_api_key("boss", admin=["*"]).secret
    http = serve()
    new = c.create_api_key("new", consume=["*"]).secret
    assert http.get("/topics", headers=bearer(new)).status == 200
    c.revoke_api_key("new")
    wait_for(lambda: http.get("/topics", headers=bearer(new)).status == 401, "the revoked key is refused", timeout=2)
    assert http.get("/topics", headers=bearer(boss)).status == 200
    c.revoke_api_key("boss")
    wait_for(lambda: http.get("/topics", headers=bearer(boss)).status == 401, "the last key is refused", timeout=2)


@pytest.mark.req("G19")
def test_the_revocation_of_the_last_key_opens_nothing(
    c: custody.Custody,
    serve: Callable[..., Http],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(keyring, "FRESH", 0.1)
    monkeypatch.setattr(keyring, "AGAIN", 0.0)
    boss = c.create_api_key("boss", admin=["*"]).secret
    http, opened = serve(), serve(open=True)
    assert http.get("/topics", headers=bearer(boss)).status == 200
    assert opened.get("/topics").status == 401, "with keys, both ask for one"
    c.revoke_api_key("boss")
    wait_for(lambda: http.get("/topics", headers=bearer(boss)).status == 401, "the last key is refused", timeout=2)
    wait_for(lambda: opened.get("/topics").status == 200, "only what was said to be open opens", timeout=2)
    for _ in range(3):
        assert http.get("/topics").status == 401
    assert "the last API key was revoked: every call is refused" in caplog.text
    with pytest.raises(KeysNeeded, match="--open"):
        Server(c, ServerSettings(port=0))
    new = c.create_api_key("boss", admin=["*"]).secret
    assert http.get("/topics", headers=bearer(new)).status == 200, "a new key works at once"
    wait_for(lambda: opened.get("/topics").status == 401, "and both ask for it", timeout=2)


@pytest.mark.req("G19")
@pytest.mark.parametrize("path", ["/messages/orders?group=g&wait=20s", "/topics/orders/wakeups?since=1&wait=20s"])
def test_a_key_that_is_revoked_while_it_waits_gets_nothing(
    c: custody.Custody, serve: Callable[..., Http], monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(keyring, "FRESH", 0.0)
    c.create_topic("orders")
    c.create_group("orders", "g")
    c.create_api_key("boss", admin=["*"])
    secret = c.create_api_key("shop", consume=["*"]).secret
    http = serve()
    if "wakeups" in path:
        wait_for(lambda: http.state.wakeups._missed, "the server has begun to listen")
        path = path.replace("since=1", f"since={http.state.wakeups.token('orders')}")
    with ThreadPoolExecutor(1) as clients:
        poll = clients.submit(http.get, path, headers=bearer(secret))
        wait_for(lambda: len(http.state.long_polls) or http.state.wakeups._waiting, "it waits")
        c.revoke_api_key("shop")
        c.publish("orders", 1)
        answer = poll.result()
    assert (answer.status, answer.code) == (401, "unauthorized")
    assert c.claim("orders", "g").messages[0].attempt == 1


@pytest.mark.req("G19")
def test_the_end_of_the_last_key_opens_nothing(
    c: custody.Custody, clock: Clock, serve: Callable[..., Http], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keyring, "FRESH", 0.1)
    short = c.create_api_key("short", admin=["*"], expires="1h").secret
    http = serve()
    assert http.get("/topics", headers=bearer(short)).status == 200
    clock.move(3600)
    wait_for(lambda: http.get("/topics", headers=bearer(short)).status == 401, "it has expired", timeout=2)
    assert http.get("/topics").status == 401


@pytest.mark.req("G19")
def test_what_a_key_does_is_journalled_under_its_name(c: custody.Custody, serve: Callable[..., Http]) -> None:
    c.create_topic("orders")
    c.publish("orders", 1)
    c.publish("orders", 2)
    headers = bearer(c.create_api_key("shop", consume=["orders"]).secret)
    http = serve()
    for given in ({}, {"X-Custody-Worker": "boss"}):
        http.get("/messages/orders", headers={**headers, **given})
    entries = [entry.worker for offset in (0, 1) for entry in c.trace("orders", 0, offset) if entry.worker is not None]
    assert entries == ["shop", "shop/boss"]


class Reads:
    """Counts what a ring of keys costs, with a clock of its own."""

    def __init__(self, ring: Callable[[], KnownKeys]) -> None:
        self.count, self.now, self._ring = 0, 0.0, ring
        self.failing = False

    def __call__(self) -> KnownKeys:
        self.count += 1
        if self.failing:
            raise DatabaseUnavailable
        return self._ring()

    def ring(self) -> Keyring:
        return Keyring(
            self,
            required=False,
            in_thread=lambda read: asyncio.get_running_loop().run_in_executor(None, read),
            clock=lambda: self.now,
        )


async def shown(ring: Keyring, secret: str) -> Caller | None:
    try:
        return await ring.caller({b"authorization": f"Bearer {secret}".encode()})
    except Unauthorized:
        return None


@pytest.mark.req("G19")
def test_neither_good_nor_bad_keys_cost_a_call_of_the_database_each(c: custody.Custody) -> None:
    good = c.create_api_key("shop", consume=["orders"])
    reads = Reads(ServerVerbs(c).key_ring)
    wrong = [f"cus_{number:012}_{'A' * 43}" for number in range(1000)] + ["x" * 5000, good.secret[:-1] + "="]

    async def attack() -> None:
        ring = reads.ring()
        ring.load()
        callers = {await shown(ring, good.secret) for _ in range(1000)}
        assert {caller and caller.name for caller in callers} == {"shop"}
        assert reads.count == 1
        reads.now = 1.5
        assert await asyncio.gather(*(shown(ring, secret) for secret in wrong)) == [None] * len(wrong)
        for secret in wrong:
            assert await shown(ring, secret) is None
        assert reads.count == 2, "all guesses of a second cost one call"

    asyncio.run(attack())


@pytest.mark.req("G19")
def test_what_was_read_is_renewed_before_it_is_old_and_not_believed_after(c: custody.Custody) -> None:
    key = c.create_api_key("shop", consume=["orders"]).secret
    reads = Reads(ServerVerbs(c).key_ring)

    async def watch() -> None:
        ring = reads.ring()
        ring.load()
        c.revoke_api_key("shop")
        reads.now = 2.0
        assert await shown(ring, key) is not None
        reads.now = 3.0
        assert await shown(ring, key) is not None, "it is read again, and nobody waits for it"
        while reads.count < 2 or ring._reading is not None:
            await asyncio.sleep(0)
        assert await shown(ring, key) is None
        c.create_api_key("other", consume=["orders"])
        reads.now = 100.0
        assert await shown(ring, key) is None, "long idle: it is read before anybody is believed"
        reads.now, reads.failing = 200.0, True
        with pytest.raises(DatabaseUnavailable):
            await shown(ring, key)

    asyncio.run(watch())
