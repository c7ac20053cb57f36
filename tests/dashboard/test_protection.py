"""Who may see and do what, forms of other pages, and texts that would be code if they were not escaped."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from tests.dashboard.conftest import raised, submit
from tests.http.conftest import Http, Response

import custody

pytestmark = pytest.mark.req("N6", "G19")

GROUP = "/ui/topics/orders/groups/billing"
HOSTILE = "<script>alert(1)</script>\"' onload=x \u202egnp.exe\u0000 {{ 7*7 }}"


def log_in(http: Http, key: str, after: str = "/ui") -> dict[str, str]:
    """The header of a browser that has logged in."""
    answer = submit(http, "/ui/login", {"key": key, "next": after})
    assert answer.status == 303, answer.body.decode()
    cookie, *rest = answer.headers["set-cookie"].split("; ")
    assert {"HttpOnly", "SameSite=Lax", "Path=/ui"} <= set(rest)
    assert key not in cookie
    return {"Cookie": cookie}


def assert_protected(answer: Response) -> None:
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_every_answer_has_the_policy(troubled: custody.Custody, http_: Http) -> None:
    page = http_.get("/ui")
    for answer in (page, http_.get("/ui/none"), http_.get(GROUP + "/dead.ndjson"), submit(http_, GROUP + "/resume")):
        assert_protected(answer)
        assert answer.headers["cache-control"] == "no-store"
    body = page.body.decode()
    assert "<style" not in body
    assert " style=" not in body
    assert "<script>" not in body
    script = body.partition('<script src="')[2].partition('"')[0]
    asset = http_.get(script)
    assert (asset.status, asset.headers["cache-control"]) == (200, "public, max-age=31536000, immutable")
    assert_protected(asset)


def test_texts_of_others_are_never_markup(c: custody.Custody, http_: Http) -> None:
    c.create_topic("orders")
    c.create_group("orders", "billing", custody.Policy(ordering="key", max_attempts=1, on_dead="hold"))
    text = HOSTILE.replace("\0", "")
    c.publish("orders", {"text": HOSTILE}, key=text, headers={text: text})
    c.publish("orders", HOSTILE, key=text + "2")
    c.publish("orders", bytes(range(256)) * 8, key="bytes")
    lease = c.claim("orders", "billing", max_messages=10)
    for message in lease.messages:
        lease.nack(message, error=raised(text))
    c.pause("orders", "billing", reason=text)
    paths = ["/ui", GROUP, GROUP + "/dead", GROUP + "/dead/0/0", "/ui/topics/orders/messages/0/0"]
    paths += [f"{GROUP}/dead?key=%3Cscript%3Ealert(1)%3C/script%3E", "/ui?q=%3Cscript%3Ealert(1)%3C/script%3E"]
    for path in paths:
        body = http_.get(path).body.decode()
        assert "<script>alert" not in body, path
        seen = re.sub(r' value="[^"]*"', "", body)  # a field has the key itself: it is not shown
        assert "\u202e" not in seen, path
        assert "49" not in body.partition("alert(1)")[2][:80], path
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in http_.get(GROUP + "/dead/0/0").body.decode()
    preview = submit(http_, GROUP + "/release", {"key": text}).body.decode()
    assert "<script>alert" not in preview


@pytest.mark.req("G20")
def test_a_form_of_another_page_is_refused(troubled: custody.Custody, http_: Http) -> None:
    own = {"Content-Type": "application/x-www-form-urlencoded"}
    for headers in (
        {},
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},
        {"Origin": http_.url, "Sec-Fetch-Site": "cross-site"},
        {"Origin": http_.url, "Sec-Fetch-Site": "same-site"},
    ):
        refused = http_("POST", GROUP + "/pause", b"reason=x", headers={**own, **headers})
        assert refused.status == 403, headers
    assert troubled.stats("orders", "billing").paused_at is None
    assert http_.get("/ui", headers={"Host": "evil.example"}).status == 403, "a name that is not of this machine"
    assert http_("POST", GROUP + "/pause", {"reason": 1}, headers={"Origin": http_.url}).status == 422, "not a form"


def test_a_server_without_keys_says_so(http_: Http) -> None:
    assert "asks for no API key" in http_.get("/ui").body.decode()
    assert http_.get("/ui/login").headers["location"] == "/ui"


def test_a_key_is_needed_and_names_the_actor(troubled: custody.Custody, serve: Callable[..., Http]) -> None:
    key = troubled.create_api_key("anna", admin=["*"]).secret
    http = serve()
    moved = http.get(GROUP)
    assert (moved.status, moved.headers["location"]) == (
        303,
        "/ui/login?next=%2Fui%2Ftopics%2Forders%2Fgroups%2Fbilling",
    )
    assert http.get("/ui", headers={"HX-Request": "true"}).headers["hx-refresh"] == "true"
    assert submit(http, "/ui/login", {"key": "cus_wrong"}).status == 403
    for elsewhere in ("https://evil.example", "//evil.example", "/ui\\..", "/topics", "/ui\r\nSet-Cookie: a=b"):
        answer = submit(http, "/ui/login", {"key": key, "next": elsewhere})
        assert answer.headers["location"] == "/ui", elsewhere
    browser = log_in(http, key)
    page = http.get("/ui", headers=browser).body.decode()
    assert "anna" in page
    assert "asks for no API key" not in page
    submit(http, GROUP + "/skip", {"partition": 0, "offset": 0, "step": "do"}, **browser)
    assert troubled.trace("orders", 0, 0, group="billing")[-1].worker == "anna/dashboard"
    ended = submit(http, "/ui/logout", **browser)
    assert "Max-Age=0" in ended.headers["set-cookie"]
    assert http.get("/ui", headers=browser).status == 303, "the session has ended, and not only its cookie"


def test_who_may_consume_looks_and_who_may_administer_acts(
    troubled: custody.Custody, serve: Callable[..., Http]
) -> None:
    troubled.create_topic("secret")
    troubled.create_group("secret", "agents")
    viewer = troubled.create_api_key("viewer", consume=["orders"]).secret
    producer = troubled.create_api_key("producer", produce=["*"]).secret
    http = serve()
    looks = log_in(http, viewer)
    overview = http.get("/ui", headers=looks).body.decode()
    assert "billing" in overview
    assert "agents" not in overview
    assert "secret" not in http.get("/ui/topics", headers=looks).body.decode()
    page = http.get(GROUP, headers=looks)
    assert page.status == 200
    assert "Retry now" not in page.body.decode()
    for path in ("/ui/topics/secret", "/ui/topics/secret/groups/agents", "/ui/workers", "/ui/outbox", "/ui/schedules"):
        assert http.get(path, headers=looks).status == 403, path
    for action in ("pause", "resume", "retry", "release", "skip", "rewind", "redrive", "discard"):
        for step in ("preview", "do"):
            fields = {"step": step, "key": "A", "partition": 0, "offset": 0, "to_offset": 0, "which": "filter"}
            assert submit(http, f"{GROUP}/{action}", fields, **looks).status == 403, action
    assert troubled.stats("orders", "billing").dead == 2
    assert http.get("/ui", headers=log_in(http, producer)).status == 403


def test_no_value_becomes_a_header(http_: Http) -> None:
    moved = http_.get("/ui/message?topic=a%0d%0aSet-Cookie:%20b=c&offset=1")
    assert moved.headers["location"] == "/ui/topics/a%0D%0ASet-Cookie%3A%20b%3Dc/messages/0/1"
    assert "set-cookie" not in moved.headers
    assert submit(http_, "/ui/topics/a/groups/b/pause", [("a", "b")] * 20_001).status == 422
    assert http_.get("/ui/topics/a%0d%0ab").status == 404


def test_a_revoked_key_ends_its_sessions(
    troubled: custody.Custody, serve: Callable[..., Http], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("custody.http.keyring.FRESH", 0.0)
    troubled.create_api_key("other", admin=["*"])
    key = troubled.create_api_key("anna", admin=["*"]).secret
    http = serve()
    browser = log_in(http, key)
    assert http.get("/ui", headers=browser).status == 200
    troubled.revoke_api_key("anna")
    assert http.get("/ui", headers=browser).status == 303
