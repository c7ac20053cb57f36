"""Web pages: those of others cannot call, a name that is not ours is refused, and --origin lets a page in."""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import urlsplit

import pytest
from tests.http.conftest import Http

import custody

pytestmark = pytest.mark.core

APP = "https://app.example.com"
ASKED = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}


@pytest.mark.req("G20")
def test_a_foreign_page_cannot_call(c: custody.Custody, http_: Http) -> None:
    c.create_topic("orders")
    for origin in ("https://evil.example", "null", "http://127.0.0.1", "http://localhost:1", http_.url + ".evil", ""):
        for method, path, body in (("GET", "/topics", None), ("POST", "/messages", {"topic": "orders", "payload": 1})):
            refused = http_(method, path, body, headers={"Origin": origin})
            assert (refused.status, refused.code) == (403, "forbidden"), origin
            assert "access-control-allow-origin" not in refused.headers
    assert c.topic("orders").message_count == 0


@pytest.mark.req("G20")
def test_a_page_of_our_own_can_call(c: custody.Custody, http_: Http) -> None:
    c.create_topic("orders")
    for headers in ({"Origin": http_.url, "Sec-Fetch-Site": "same-origin"}, {"Sec-Fetch-Site": "none"}, {}):
        answer = http_.post("/messages", {"topic": "orders", "payload": 1}, headers=headers)
        assert answer.status == 200
        assert not [name for name in answer.headers if name.startswith("access-control")]
    assert http_.get("/docs", headers={"Sec-Fetch-Site": "cross-site"}).status == 200, "a link to the docs works"


@pytest.mark.req("G20")
@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_a_foreign_page_cannot_receive_by_an_image(c: custody.Custody, http_: Http, site: str) -> None:
    c.create_topic("orders")
    c.publish("orders", 1)
    headers = {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "image"}
    assert http_.get("/messages/orders?auto_ack=true", headers=headers).status == 403
    assert len(http_.get("/messages/orders").json["messages"]) == 1


@pytest.mark.req("G20")
def test_without_origin_cors_is_off(http_: Http) -> None:
    for headers in ({"Origin": APP, **ASKED}, {"Origin": http_.url, **ASKED}):
        answer = http_("OPTIONS", "/messages", headers=headers)
        assert not [name for name in answer.headers if name.startswith("access-control")]
    assert http_("OPTIONS", "/messages", headers={"Origin": APP, **ASKED}).status == 403
    assert http_("OPTIONS", "/messages").status == 405


@pytest.mark.req("G20")
def test_origin_lets_a_page_in(c: custody.Custody, serve: Callable[..., Http]) -> None:
    c.create_topic("orders")
    key = c.create_api_key("app", produce=["orders"]).secret
    http = serve(origins=(APP,))
    asked = http("OPTIONS", "/messages", headers={"Origin": APP, **ASKED})  # without a key: browsers send none here
    assert (asked.status, asked.body) == (204, b"")
    assert asked.headers["access-control-allow-origin"] == APP
    assert {"GET", "POST", "PATCH", "DELETE"} == set(asked.headers["access-control-allow-methods"].split(", "))
    allowed = asked.headers["access-control-allow-headers"].lower().split(", ")
    assert {"authorization", "content-type", "x-api-key"} <= set(allowed)
    assert "access-control-allow-credentials" not in asked.headers
    message = {"topic": "orders", "payload": 1}
    sent = http.post("/messages", message, headers={"Origin": APP, "Authorization": f"Bearer {key}"})
    assert (sent.status, sent.headers["access-control-allow-origin"], sent.headers["vary"]) == (200, APP, "Origin")
    assert "X-Request-Id" in sent.headers["access-control-expose-headers"]
    refused = http.post("/messages", message, headers={"Origin": APP})
    assert (refused.status, refused.headers["access-control-allow-origin"]) == (401, APP), "a page can read why"
    for method in ("OPTIONS", "POST"):
        foreign = http(method, "/messages", message, headers={"Origin": "https://evil.example", **ASKED})
        assert foreign.status == 403
        assert "access-control-allow-origin" not in foreign.headers
        assert foreign.headers["vary"] == "Origin"


@pytest.mark.req("G20")
def test_a_name_that_is_not_of_this_machine_is_refused(c: custody.Custody, http_: Http) -> None:
    port = urlsplit(http_.url).port
    for host in (f"127.0.0.1:{port}", f"localhost:{port}", "LOCALHOST", "[::1]", "127.0.0.1"):
        assert http_.get("/topics", headers={"Host": host}).status == 200, host
    for host in (f"evil.example:{port}", "127.0.0.1.evil.example", "localhost.", "[::1", "10.0.0.1", "%"):
        refused = http_.get("/topics", headers={"Host": host})
        assert (refused.status, refused.code) == (403, "forbidden"), host
    rebound = {"Host": f"evil.example:{port}", "Origin": f"http://evil.example:{port}"}
    assert http_.get("/topics", headers=rebound).status == 403
    assert http_.get("/healthz", headers=rebound).status == 403


@pytest.mark.req("G20")
def test_with_keys_a_proxy_may_use_any_name(c: custody.Custody, serve: Callable[..., Http]) -> None:
    key = c.create_api_key("proxy", admin=["*"]).secret
    http = serve()
    assert http.get("/topics", headers={"Host": "custody.example.com"}).status == 401
    named = {"Host": "custody.example.com", "Authorization": f"Bearer {key}"}
    assert http.get("/topics", headers=named).status == 200
    assert http.get("/healthz", headers={"Host": "custody.example.com"}).status == 200
