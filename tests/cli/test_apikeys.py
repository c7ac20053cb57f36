"""custody apikeys."""

from __future__ import annotations

import pytest
from tests.cli.conftest import Run

from custody import Custody
from custody.engine.server_verbs import ServerVerbs


@pytest.mark.req("G19")
def test_a_key_is_made_listed_and_revoked(quick: Run, live: Custody, explained) -> None:
    assert "There are no keys" in quick("apikeys", "list").out
    made = quick("apikeys", "create", "shop", "--produce", "orders", "--produce", "stock-*", "--expires", "90d")
    secret = made.out.strip()
    found = ServerVerbs(live).key_ring().find(secret.encode())
    assert found is not None
    assert (found.name, found.produce) == ("shop", ("orders", "stock-*"))
    assert secret not in made.err
    document = quick("apikeys", "create", "boss", "--admin", "*", "--json").document
    explained(document)
    assert ServerVerbs(live).key_ring().find(document["secret"].encode()) is not None
    listed = quick("apikeys", "list", "--json")
    explained(listed.document)
    assert [key["name"] for key in listed.document] == ["shop", "boss"]
    assert secret[17:] not in listed.out
    assert "in use" in quick("apikeys", "list").out
    assert "key_exists" in quick("apikeys", "create", "shop", "--admin", "*", "--json", code=1).err
    revoked = quick("apikeys", "revoke", "shop", "--json").document
    explained(revoked)
    assert revoked == {"name": "shop", "revoked": True, "left": 1}
    assert "was already revoked" in quick("apikeys", "revoke", "shop").out
    assert "That was the last key" in quick("apikeys", "revoke", "boss").err
    assert "revoked" in quick("apikeys", "list", "--all").out
    assert quick("apikeys", "list", "--json").document == []


@pytest.mark.req("G20")
def test_a_key_that_cannot_be_is_refused(quick: Run, live: Custody) -> None:
    assert "needs a right" in quick("apikeys", "create", "shop", code=2).err
    assert "pattern" in quick("apikeys", "create", "shop", "--admin", "a b", code=1).err
    assert "not a duration" in quick("apikeys", "create", "shop", "--admin", "*", "--expires", "soon", code=2).err
    assert "key_not_found" in quick("apikeys", "revoke", "nobody", "--json", code=1).err
    assert live.api_keys(revoked=True) == []
