"""A key stays whole: a message goes to a partition that is not its key's only if it says so."""

from __future__ import annotations

from collections.abc import Callable

import psycopg
import pytest
from tests.conformance.conftest import refused

import custody
from custody import Outgoing
from custody.model.placement import partition_for

pytestmark = [pytest.mark.core, pytest.mark.req("K2")]

PARTITIONS = 4
OWN = partition_for("sku", PARTITIONS)
OTHER = (OWN + 1) % PARTITIONS


@pytest.fixture
def parts(c: custody.Custody) -> custody.Custody:
    c.create_topic("orders", partitions=PARTITIONS)
    return c


def in_transaction(c: custody.Custody, message: Outgoing) -> object:
    with c.init_producer("p").transaction() as transaction:
        transaction.publish_many("orders", [message])
    return transaction.receipts


Publish = Callable[[custody.Custody, Outgoing], object]
AT_ONCE: list[Publish] = [
    lambda c, message: c.publish_many("orders", [message]),
    lambda c, message: c.publish_many("orders", [Outgoing(0), *[message] * 70]),
    lambda c, message: c.init_producer("p").publish_many("orders", [message]),
    in_transaction,
]
LATER: list[Publish] = [
    lambda c, message: c.publish_delayed("orders", [message]),
    lambda c, message: c.init_producer("p").publish_delayed("orders", [message]),
    in_transaction,
]
WAYS = [(publish, {}) for publish in AT_ONCE] + [(publish, {"delay": "1h"}) for publish in LATER]


def stored(c: custody.Custody) -> int:
    return c.topic("orders").message_count + c.delayed_count("orders")


@pytest.mark.parametrize(("publish", "rest"), WAYS)
def test_a_key_beside_another_partition_is_refused(
    parts: custody.Custody, publish: Publish, rest: dict[str, str]
) -> None:
    with refused("key_split") as found:
        publish(parts, Outgoing(1, key="sku", partition=OTHER, **rest))  # type: ignore[arg-type]
    assert f"'sku' belongs to partition {OWN}" in found[0].message
    assert "allow_split" in found[0].remedy
    assert stored(parts) == 0
    publish(parts, Outgoing(1, key="sku", partition=OWN, **rest))  # type: ignore[arg-type]
    before = stored(parts)
    publish(parts, Outgoing(1, key="sku", partition=OTHER, allow_split=True, **rest))  # type: ignore[arg-type]
    assert stored(parts) == 2 * before
    with refused("partition_not_found"):
        publish(parts, Outgoing(1, key="sku", partition=PARTITIONS, **rest))  # type: ignore[arg-type]
    with refused("partition_not_found"):
        publish(parts, Outgoing(1, key="sku", partition=PARTITIONS, allow_split=True, **rest))  # type: ignore[arg-type]


def test_one_message(parts: custody.Custody) -> None:
    with refused("key_split"):
        parts.publish("orders", 1, key="sku", partition=OTHER)
    with refused("key_split"):
        parts.publish("orders", 1, key="sku", partition=OTHER, delay="1h")
    assert parts.publish("orders", 1, key="sku", partition=OTHER, allow_split=True).partition == OTHER
    assert parts.publish("orders", 1, partition=OTHER).partition == OTHER


def test_any_priority_of_its_own_partition_is_the_keys_place(c: custody.Custody) -> None:
    c.create_topic("orders", partitions=PARTITIONS, priorities=True)
    for lane in range(5):
        assert c.publish("orders", 1, key="sku", partition=OWN * 5 + lane).partition == OWN * 5 + lane
        with refused("key_split"):
            c.publish("orders", 1, key="sku", partition=OTHER * 5 + lane)


def test_where_a_key_belongs_is_a_matter_of_the_partitions_of_now(c: custody.Custody, direct: custody.Custody) -> None:
    c.create_topic("orders", partitions=2)
    key = next(key for key in map(str, range(100)) if partition_for(key, 2) != partition_for(key, PARTITIONS))
    before, after = partition_for(key, 2), partition_for(key, PARTITIONS)
    other = next(p for p in range(2) if p != before)
    c.publish("orders", 1, key=key, partition=before)
    epoch = c.init_producer("p").epoch
    transaction, _ = c.transactions.begin("p", epoch=epoch, timeout=None)
    moves, stays = Outgoing(1, key=key, partition=before), Outgoing(1, key=key, partition=other, allow_split=True)
    c.transactions.add(transaction, "orders", [moves, stays])
    c.publish("orders", "delayed", key=key, partition=before, delay="1h")
    direct.grow_topic("orders", partitions=PARTITIONS)
    with refused("key_split"):  # whatever the client remembers
        c.publish("orders", 1, key=key, partition=before)
    c.publish("orders", 1, key=key, partition=after)
    assert [one.partition for one in c.transactions.commit(transaction)] == [after, other]
    assert [one.partition for one in c.delayed("orders")] == [after]


@pytest.mark.parametrize("verb", ["publish", "publish_delayed"])
def test_plain_sql(direct: custody.Custody, db: psycopg.Connection, verb: str) -> None:
    direct.create_topic("orders", partitions=PARTITIONS)
    times = "ARRAY[now()], ARRAY[NULL::float8]," if verb == "publish_delayed" else ""
    call = (
        f"SELECT * FROM custody.{verb}('orders', %s, ARRAY['sku'], ARRAY['j'], ARRAY['1'::bytea], ARRAY[NULL], {times}"
    )
    with pytest.raises(psycopg.Error) as found:
        db.execute(call + "p_allow_split => false)", [[OTHER]])  # type: ignore[arg-type]
    assert found.value.diag.message_detail == "key_split"
    db.execute(call + "p_allow_split => false)", [[OWN]])  # type: ignore[arg-type]
    db.execute(call + "p_allow_split => true)", [[OTHER]])  # type: ignore[arg-type]
    direct.create_group("orders", "g")
    assert {direct.claim("orders", "g").messages[0].partition for _ in range(2)} == {OWN, OTHER}


def test_a_repeat_that_is_refused_stays_unknown(direct: custody.Custody, database_url: str) -> None:
    """The topic has grown since an attempt without an answer: the next message is not taken for that one."""
    direct.create_topic("orders", partitions=2)
    key = next(key for key in map(str, range(100)) if partition_for(key, 2) != partition_for(key, PARTITIONS))
    producer = direct.init_producer("p")
    publish = producer._publish

    def lost(*given: object, **rest: object) -> list[custody.Receipt]:
        publish(*given, **rest)
        raise custody.errors.DatabaseUnavailable

    producer._publish = lost
    with refused("database_unavailable"):
        producer.publish("orders", "first", key=key, partition=partition_for(key, 2))
    producer._publish = publish
    direct.grow_topic("orders", partitions=PARTITIONS)
    for _ in range(2):
        with refused("key_split"):
            producer.publish("orders", "second")
    assert direct.topic("orders").message_count == 1
