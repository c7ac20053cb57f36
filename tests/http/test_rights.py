"""Every call needs a right on what it touches: a key without it gets 403, or a list without what is not its own."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from tests.http.conftest import Http, Response

import custody
from custody.http import keyring
from custody.http.app import OPERATIONS
from custody.http.operation import Operation
from custody.http.rights import Caller

pytestmark = pytest.mark.core

KEYS: dict[str, dict[str, list[str]]] = {
    "produce": {"produce": ["orders*"]},
    "consume": {"consume": ["orders*"]},
    "admin": {"admin": ["orders*"]},
    "other produce": {"produce": ["elsewhere"]},
    "other consume": {"consume": ["elsewhere"]},
    "other admin": {"admin": ["elsewhere", "order", "rders*", "Orders*"]},
    "all": {"admin": ["*"]},
}
PRODUCE, CONSUME, ADMIN = {"produce", "admin", "all"}, {"consume", "admin", "all"}, {"admin", "all"}
ANY, EVERYWHERE = {"produce", "consume", "admin", "all"}, {"all"}
PRODUCE_SOMEWHERE, CONSUME_SOMEWHERE = (
    PRODUCE | {"other produce", "other admin"},
    CONSUME | {"other consume", "other admin"},
)
EVERYBODY = set(KEYS)

GROUP = "/topics/{topic}/groups/{group}"
# who may call what; and what with, where the example of the operation does not do
WANTED: dict[tuple[str, str], set[str]] = {
    ("POST", "/messages"): PRODUCE,
    ("GET", "/topics/{topic}/partitions/{partition}/messages"): CONSUME,
    ("GET", "/topics/{topic}/delayed"): CONSUME,
    ("GET", "/topics/{topic}/delayed/count"): CONSUME,
    ("DELETE", "/topics/{topic}/delayed/{delay_id}"): PRODUCE,
    ("POST", "/topics/{topic}/events"): PRODUCE,
    ("GET", "/topics/{topic}/wakeups"): CONSUME,
    ("POST", "/messages/ack"): CONSUME,
    ("POST", "/messages/nack"): CONSUME,
    ("POST", "/messages/release"): CONSUME,
    ("POST", "/messages/later"): CONSUME,
    ("POST", "/messages/skip"): CONSUME,
    ("POST", "/messages/settle"): CONSUME,
    ("POST", "/messages/extend-visibility"): CONSUME,
    ("GET", "/messages/{topic}/{partition}"): CONSUME,
    ("GET", "/messages/{topic}"): CONSUME,
    ("POST", "/topics"): ADMIN,
    ("GET", "/topics"): EVERYBODY,
    ("GET", "/topics/{topic}"): ANY,
    ("PATCH", "/topics/{topic}"): ADMIN,
    ("DELETE", "/topics/{topic}"): ADMIN,
    ("GET", "/topics/{topic}/inflight"): CONSUME,
    ("GET", "/topics/{topic}/segments"): CONSUME,
    ("GET", "/topics/{topic}/kept"): CONSUME,
    ("POST", "/maintain"): EVERYWHERE,
    ("GET", "/journal"): EVERYWHERE,
    ("PATCH", "/journal"): EVERYWHERE,
    ("POST", "/topics/{topic}/groups"): ADMIN,
    ("GET", "/topics/{topic}/groups"): CONSUME,
    ("GET", GROUP): CONSUME,
    ("PATCH", GROUP): ADMIN,
    ("DELETE", GROUP): ADMIN,
    ("GET", GROUP + "/stats"): CONSUME,
    ("GET", GROUP + "/due"): CONSUME,
    ("GET", GROUP + "/dead"): CONSUME,
    ("POST", GROUP + "/redrive"): ADMIN,
    ("POST", GROUP + "/discard"): ADMIN,
    ("POST", GROUP + "/rewind"): ADMIN,
    ("POST", GROUP + "/pause"): ADMIN,
    ("POST", GROUP + "/resume"): ADMIN,
    ("GET", GROUP + "/blocked"): CONSUME,
    ("GET", GROUP + "/map"): CONSUME,
    ("GET", GROUP + "/leases"): CONSUME,
    ("POST", GROUP + "/blocked/release"): ADMIN,
    ("GET", GROUP + "/states"): CONSUME,
    ("POST", GROUP + "/states/delete"): ADMIN,
    ("POST", GROUP + "/blocked/skip"): ADMIN,
    ("POST", GROUP + "/retry"): ADMIN,
    ("GET", GROUP + "/fetch"): CONSUME,
    ("POST", GROUP + "/commit"): CONSUME,
    ("POST", "/producers/init"): PRODUCE_SOMEWHERE,
    ("GET", "/producers/{producer_id}"): PRODUCE,
    ("DELETE", "/producers/{producer_id}"): PRODUCE_SOMEWHERE,
    ("POST", "/transactions/begin"): PRODUCE_SOMEWHERE,
    ("POST", "/transactions/ack"): CONSUME,
    ("POST", "/transactions/commit"): PRODUCE_SOMEWHERE,
    ("POST", "/transactions/abort"): PRODUCE_SOMEWHERE,
    ("GET", "/transactions"): EVERYWHERE,
    ("GET", "/topics/{topic}/partitions/{partition}/messages/{offset}/history"): CONSUME,
    ("POST", "/messages/dlq/replay"): ADMIN,
    ("GET", "/handling-times"): CONSUME_SOMEWHERE,
    ("GET", "/server"): EVERYWHERE,
    ("GET", "/status"): EVERYWHERE,
    ("GET", "/workers"): EVERYWHERE,
    ("GET", "/groups"): EVERYWHERE,
    ("GET", "/metrics"): EVERYBODY,
    ("GET", "/schedules"): EVERYWHERE,
    ("GET", "/schedules/{name}"): EVERYWHERE,
    ("POST", "/schedules"): EVERYWHERE,
    ("PATCH", "/schedules/{name}"): EVERYWHERE,
    ("DELETE", "/schedules/{name}"): EVERYWHERE,
    ("POST", "/schedules/{name}/pause"): EVERYWHERE,
    ("POST", "/schedules/{name}/resume"): EVERYWHERE,
    ("POST", "/schedules/{name}/run"): EVERYWHERE,
    ("POST", "/schedules/attend"): EVERYWHERE,
}
LAST = [("DELETE", GROUP), ("DELETE", "/topics/{topic}")]
PARAMS = {
    "topic": "orders",
    "group": "stock",
    "partition": "0",
    "offset": "0",
    "delay_id": "1",
    "producer_id": "billing",
    "name": "refresh",
}


DIED = {
    f"x-custody-{name}": value
    for name, value in (
        ("original-topic", "orders"),
        ("original-partition", "0"),
        ("original-offset", "0"),
        ("consumer-group", "stock"),
    )
}


class Walk:
    """A database with something of everything, a server on it, and a key for each kind of caller."""

    def __init__(self, c: custody.Custody, http: Callable[..., Http]) -> None:
        c.create_topic("orders")
        c.create_topic("elsewhere")
        c.create_topic("orders-dlq")
        c.create_group("orders", "stock")
        c.create_schedule("refresh", topic="orders", every="1h")
        producer = c.init_producer("billing")
        producer.publish("orders", 1)
        c.publish("orders-dlq", 1, headers=DIED)
        self.lease = str(c.claim("orders", "stock").lease_id)
        transaction_id, _ = c.transactions.begin("billing", epoch=producer.epoch, timeout=None)
        self.transaction = str(transaction_id)
        self.secrets = {name: c.create_api_key(name.replace(" ", "-"), **given).secret for name, given in KEYS.items()}
        self.http = http()

    def __call__(self, caller: str, operation: Operation, **rest: Any) -> Response:
        path = re.sub(r"{(\w+)}", lambda found: PARAMS[found[1]], operation.path)
        return self.call(caller, operation.method, path, self._body(operation), **rest)

    def call(self, caller: str, method: str, path: str, body: Any = None) -> Response:
        return self.http(method, path, body, headers={"Authorization": f"Bearer {self.secrets[caller]}"})

    def _body(self, operation: Operation) -> Any:
        if operation.body is None:
            return None
        body = dict(operation.example or {})
        known = set(operation.body.__struct_fields__)
        if "lease_id" in known:  # by the lease alone: it tells which topic is meant
            for name in ("topic", "partition", "offset", "receipt"):
                body.pop(name, None)
            body["lease_id"] = self.lease
        if "transaction_id" in known and operation.path.startswith("/transactions"):
            body["transaction_id"] = self.transaction
        if operation.path == "/topics":
            body["name"] = "orders-2"
        if operation.path == "/maintain":
            body.pop("topic", None)  # of all topics
        if operation.path == "/messages/dlq/replay":
            body["offset"] = 0
        return body


@pytest.fixture
def walk(c: custody.Custody, serve: Callable[..., Http]) -> Walk:
    return Walk(c, serve)


@pytest.mark.req("G19")
def test_a_key_can_do_what_its_rights_say_and_nothing_else(walk: Walk) -> None:
    operations = {(one.method, one.path): one for one in OPERATIONS if not one.open}
    assert set(operations) == set(WANTED), "each operation says here who may call it"
    for place, operation in operations.items():
        for caller in KEYS:
            if caller not in WANTED[place]:
                refused = walk(caller, operation)
                assert refused.status == 403, f"{caller} may call {place}: {refused.body!r}"
                assert refused.code == "forbidden"
    # only then what may be done: it changes what there is
    for place in [*(place for place in operations if place not in LAST), *LAST]:
        for caller in WANTED[place]:
            answer = walk(caller, operations[place])
            assert answer.status not in (401, 403, 422), f"{caller} may not call {place}: {answer.body!r}"
            assert answer.status < 500


@pytest.mark.req("G19")
def test_only_health_and_the_description_are_for_everybody() -> None:
    assert {one.path for one in OPERATIONS if one.open} == {"/healthz", "/readyz"}


@pytest.mark.req("G19")
def test_lists_have_only_what_a_key_has_a_right_to(walk: Walk) -> None:
    walk.call("all", "POST", "/messages/ack", {"lease_id": walk.lease})
    for caller, topics in {
        "produce": {"orders", "orders-dlq"},
        "other consume": {"elsewhere"},
        "all": {"orders", "orders-dlq", "elsewhere"},
    }.items():
        assert {topic["name"] for topic in walk.call(caller, "GET", "/topics").json} == topics
    assert [one["topic"] for one in walk.call("consume", "GET", "/handling-times").json] == ["orders"]
    assert walk.call("other consume", "GET", "/handling-times").json == []


@pytest.mark.req("G19")
def test_a_publish_needs_the_right_on_each_of_its_topics(walk: Walk, c: custody.Custody) -> None:
    both = {"messages": [{"topic": "orders", "payload": 2}, {"topic": "elsewhere", "payload": 2}]}
    for body in (both, {**both, "transaction_id": walk.transaction}):
        for caller in ("produce", "admin", "other produce", "consume"):
            assert walk.call(caller, "POST", "/messages", body).status == 403
    assert c.topic("elsewhere").message_count == 0
    assert walk.call("all", "POST", "/messages", both).status == 200


@pytest.mark.req("G19")
def test_a_lease_is_no_less_safe_under_the_name_of_another_topic(walk: Walk, c: custody.Custody) -> None:
    lie = {"lease_id": walk.lease, "topic": "elsewhere"}
    many = {"messages": [{"lease_id": walk.lease, "topic": "elsewhere", "partition": 0, "offset": 0}]}
    for path in ("ack", "nack", "release", "later", "skip", "extend-visibility"):
        for body in (lie, many) if path != "extend-visibility" else (lie,):
            wanted = {**body, "after": "1s"} if path == "later" else body
            answer = walk.call("other consume", "POST", f"/messages/{path}", wanted)
            assert (answer.status, answer.code) == (409, "lease_lost"), path
    for topic in ("elsewhere", "orders"):
        answer = walk.call("other consume", "GET", f"/messages/{topic}?ack={walk.lease}")
        assert (answer.status, answer.code) == (403, "forbidden")
    assert c.stats("orders", "stock").in_flight == 1
    assert walk.call("consume", "POST", "/messages/ack", {"lease_id": walk.lease}).json["settled"] == 1


@pytest.mark.req("G19")
def test_a_replay_needs_the_right_on_the_topic_that_the_copy_names(walk: Walk, c: custody.Custody) -> None:
    c.publish("elsewhere", 1, headers=DIED)
    copy = {"dlq_topic": "elsewhere", "partition": 0, "offset": 0}
    for body in (copy, {**copy, "target_topic": "elsewhere"}):
        assert walk.call("other admin", "POST", "/messages/dlq/replay", body).status == 403
    assert walk.call("admin", "POST", "/messages/dlq/replay", {**copy, "target_topic": "orders"}).status == 403
    assert c.topic("orders").message_count == 1


REPLAY = "/messages/dlq/replay"


@pytest.mark.req("G19")
@pytest.mark.parametrize("there_before", [False, True])
def test_a_copy_that_comes_after_its_rights_were_looked_at_is_not_replayed(
    walk: Walk, c: custody.Custody, monkeypatch: pytest.MonkeyPatch, there_before: bool
) -> None:
    real = walk.http.state.run

    async def run(verb: Callable[..., Any], *args: Any, **given: Any) -> Any:
        answer = await real(verb, *args, **given)
        if c.topic("elsewhere").message_count == there_before:  # between the look and the replay
            if there_before:
                c.delete_topic("elsewhere")
                c.create_topic("elsewhere")
            c.publish("elsewhere", "another's", headers=DIED)
            c.publish("elsewhere", "another's", headers=DIED)
        return answer

    if there_before:
        c.publish("elsewhere", "its own", headers={**DIED, "x-custody-original-topic": "elsewhere"})
    monkeypatch.setattr(walk.http.state, "run", run)
    answer = walk.call("other admin", "POST", REPLAY, {"dlq_topic": "elsewhere", "partition": 0, "offset": 0})
    assert (answer.status, answer.code) == ((503, "busy") if there_before else (422, "offset_out_of_range"))
    assert [message.payload for message in c.read("orders")] == [1]


@pytest.mark.req("G19")
def test_a_copy_that_has_outlived_its_segment_can_be_replayed_with_a_key(
    walk: Walk, c: custody.Custody, db: psycopg.Connection
) -> None:
    c.publish("orders-dlq", 2, headers=DIED)
    copies = [{"dlq_topic": "orders-dlq", "partition": 0, "offset": offset} for offset in (0, 1)]
    first = walk.call("admin", "POST", REPLAY, copies[0]).json
    c.create_group("orders-dlq", "watch")
    lease = c.claim("orders-dlq", "watch", max_messages=2)
    lease.ack(lease.messages[0])
    lease.nack(lease.messages[1], requeue=False)  # dead, so it is kept aside
    db.execute("SELECT custody.seal_segment('orders-dlq')")
    db.execute("SELECT custody.drop_segments('orders-dlq')")
    assert walk.call("admin", "POST", REPLAY, copies[1]).json["duplicate"] is False
    assert walk.call("admin", "POST", REPLAY, copies[0]).json == {**first, "duplicate": True}
    assert walk.call("other admin", "POST", REPLAY, copies[0]).status == 403


@pytest.mark.parametrize(
    ("pattern", "topic", "fits"),
    [
        ("orders", "orders", True),
        ("orders", "orders-dlq", False),
        ("orders*", "orders-dlq", True),
        ("orders.?", "orders.1", True),
        ("orders.?", "orders.12", False),
        ("orders.?", "ordersx1", False),
        ("*", "anything", True),
        ("Orders", "orders", False),
    ],
)
def test_patterns(pattern: str, topic: str, fits: bool) -> None:
    caller = Caller(name="shop", consume=(pattern,))
    assert caller.may("consume", topic) is fits
    assert not caller.may("produce", topic)
    assert not caller.may("admin", topic)
    assert caller.may_everywhere("consume") is (pattern == "*")


@pytest.mark.req("O8")
def test_the_event_of_one_key_does_not_hide_that_of_another(
    c: custody.Custody, serve: Callable[..., Http], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keyring, "AGAIN", 0.0)
    c.create_topic("orders")
    boss, shop = (c.create_api_key(name, admin=["*"]).secret for name in ("boss", "shop"))
    http = serve()
    event_id = str(uuid4())

    def bring(secret: str, **more: str) -> int:
        body = {"events": [{"event_id": event_id, "payload": 1}], **more}
        answer = http.post("/topics/orders/events", body, headers={"Authorization": f"Bearer {secret}"})
        assert answer.status == 200
        return int(answer.json["count"])

    assert [bring(shop), bring(shop)] == [1, 0]
    assert [bring(boss), bring(boss)] == [1, 0]
    assert [bring(shop, source="east"), bring(shop, source="east")] == [1, 0]
    assert bring(boss, source="shop/") == 1, "none can pass for another"
    assert c.topic("orders").message_count == 4
    c.revoke_api_key("shop")
    again = c.create_api_key("shop", admin=["*"]).secret
    assert bring(again) == 0, "a key that replaces another one is the same source"
    long = {"events": [], "source": "x" * 201}
    refused = http.post("/topics/orders/events", long, headers={"Authorization": f"Bearer {boss}"})
    assert (refused.status, refused.json["error"]["path"]) == (422, "$.source")
