"""custody pipeline state: list, delete."""

from __future__ import annotations

import psycopg
import pytest
from tests.cli.conftest import Run

from custody import Custody, Policy

pytestmark = pytest.mark.req("X8")


def test_states_are_listed_and_removed(quick: Run, live: Custody, db: psycopg.Connection, explained) -> None:
    live.create_topic("orders")
    live.create_group("orders", "stock", Policy(ordering="key"))
    assert quick("pipeline", "state", "list", "orders", "stock").out == "No key of orders/stock has a state.\n"
    db.execute(
        'INSERT INTO custody.key_states (group_id, key, state, partition, "offset", claim, updated_at)'
        " SELECT group_id, 'SKU-' || n, json_build_object('pieces', n), 0, n, 1, now()"
        " FROM custody.groups, generate_series(1, 3) n"
    )
    listed = quick("pipeline", "state", "list", "orders", "stock", "--after", "SKU-1", "--json").document
    explained([{**one, "state": None} for one in listed])
    assert [(one["key"], one["state"], one["offset"]) for one in listed] == [
        ("SKU-2", {"pieces": 2}, 2),
        ("SKU-3", {"pieces": 3}, 3),
    ]
    lines = quick("pipeline", "state", "list", "orders", "stock", "--key", "SKU-1").out.splitlines()
    assert lines[1].split()[:3] == ["SKU-1", '{"pieces":1}', "0/1"]
    removed = quick("pipeline", "state", "delete", "orders", "stock", "--key", "SKU-1", "--json").document
    explained(removed)
    assert removed["count"] == 1
    assert "either a key is named" in quick("pipeline", "state", "delete", "orders", "stock", code=1).err
    assert (
        "Remove the states of all keys"
        in quick("pipeline", "state", "delete", "orders", "stock", "--every", code=2).err
    )
    assert quick("pipeline", "state", "delete", "orders", "stock", "--every", "--yes").out == "removed 2 states\n"
