"""API keys: made once, kept as a digest, told apart by their id, revoked."""

from __future__ import annotations

import re

import psycopg
import pytest
from tests.conftest import Clock

import custody
from custody.engine.server_verbs import ServerVerbs
from custody.errors import InvalidArgument, KeyExists, KeyNotFound

pytestmark = pytest.mark.core


@pytest.mark.req("G19")
def test_a_key_is_known_by_its_digest_alone(c: custody.Custody, db: psycopg.Connection) -> None:
    made = c.create_api_key("shop", produce=["orders", "orders", "stock-*"], consume=["*"])
    assert re.fullmatch(r"cus_[a-z0-9]{12}_[A-Za-z0-9_-]{43}", made.secret)
    assert made.secret not in repr(made)
    assert (made.key.produce, made.key.consume, made.key.admin) == (("orders", "stock-*"), ("*",), ())
    (stored,) = db.execute("SELECT to_jsonb(k)::text FROM custody.api_keys k").fetchone() or ()
    hidden = made.secret.removeprefix(f"cus_{made.key.key_id}_")
    assert hidden not in stored
    assert db.execute(
        "SELECT digest = sha256(convert_to(%s, 'UTF8')) FROM custody.api_keys", [made.secret]
    ).fetchone() == (True,)
    assert ServerVerbs(c).key_ring().find(made.secret.encode()) == made.key == c.api_keys()[0]


@pytest.mark.req("G19")
def test_another_secret_under_the_same_id_opens_nothing(c: custody.Custody) -> None:
    one, other = c.create_api_key("one", consume=["*"]), c.create_api_key("other", consume=["*"])
    ring = ServerVerbs(c).key_ring()
    swapped = one.secret[:17] + other.secret[17:]
    altered = one.secret[:-2] + ("AA" if one.secret[-2:] != "AA" else "BB")
    for wrong in (swapped, altered, one.secret[:-1], one.secret + "A", one.secret + "\n", "", "cus_", other.key.key_id):
        assert ring.find(wrong.encode()) is None
    assert ring.find(other.secret.encode()) == other.key


@pytest.mark.req("G19")
def test_a_revoked_or_expired_key_opens_nothing(c: custody.Custody, clock: Clock) -> None:
    kept, short = c.create_api_key("kept", admin=["*"]), c.create_api_key("short", consume=["*"], expires="1h")
    assert ServerVerbs(c).key_ring().active == 2
    clock.move(3599)
    assert ServerVerbs(c).key_ring().find(short.secret.encode()) is not None
    clock.move(1)
    assert ServerVerbs(c).key_ring().find(short.secret.encode()) is None
    assert [(key.name, key.active) for key in c.api_keys()] == [("kept", True), ("short", False)]
    assert c.revoke_api_key("kept")
    assert not c.revoke_api_key("kept")
    assert ServerVerbs(c).key_ring().find(kept.secret.encode()) is None
    assert ServerVerbs(c).key_ring(), "a key that has expired still asks for one"
    assert c.revoke_api_key("short")
    assert not ServerVerbs(c).key_ring()
    assert [(key.name, key.revoked_by) for key in c.api_keys(revoked=True)] == [("kept", "test"), ("short", "test")]


@pytest.mark.req("G19")
def test_a_name_is_used_once_and_free_after_its_revocation(c: custody.Custody) -> None:
    old = c.create_api_key("shop", produce=["orders"])
    with pytest.raises(KeyExists, match="revoke that one first"):
        c.create_api_key("shop", produce=["orders"])
    c.revoke_api_key("shop")
    new = c.create_api_key("shop", produce=["orders"])
    assert ServerVerbs(c).key_ring().find(old.secret.encode()) is None
    assert ServerVerbs(c).key_ring().find(new.secret.encode()) == new.key
    with pytest.raises(KeyNotFound, match="apikeys list"):
        c.revoke_api_key("nobody")


@pytest.mark.req("G20")
@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("shop", {}, "without rights"),
        ("", {"produce": ["*"]}, "name of a key"),
        ("a b", {"produce": ["*"]}, "name of a key"),
        ("shop", {"produce": [""]}, "pattern"),
        ("shop", {"consume": ["a b"]}, "pattern"),
        ("shop", {"admin": ["[a-z]"]}, "pattern"),
        ("shop", {"admin": "orders"}, "a list"),
        ("shop", {"admin": ["*"], "expires": "0s"}, "expire"),
        ("shop", {"admin": ["*"], "expires": "soon"}, "duration"),
    ],
)
def test_a_key_that_cannot_be_is_refused(c: custody.Custody, name: str, given: dict[str, object], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        c.create_api_key(name, **given)  # type: ignore[arg-type]
    assert c.api_keys(revoked=True) == []
