"""Publishing over HTTP: one message or many, any payload, conditional and refused ones."""

from __future__ import annotations

import base64
import json

import pytest
from tests.http.conftest import Http
from tests.http.steps import error, make, payloads, publish, received

import custody

pytestmark = [pytest.mark.core, pytest.mark.req("G3")]

LETTER_FOR_LETTER = [
    "null",
    "true",
    "0",
    "-0",
    "-0.0",
    "1.0",
    "1.10",
    "1e2",
    "1E+2",
    "12345678901234567890123456789012345678901234567890",
    "0.1234567890123456789012345678901234567890",
    "[]",
    "{}",
    '{"b": 1, "a": {"c": [1, 2.50, null, "x"]}}',
    "[1,2,  3 ,\t4\n]",
    '{"a": 1, "a": 2}',
    '{"": "", "\\u00e9": "é", "emoji": "\\ud83d\\ude00😀"}',
    "[" * 200 + "]" * 200,
]


@pytest.mark.parametrize("document", LETTER_FOR_LETTER, ids=range(len(LETTER_FOR_LETTER)))
def test_a_json_payload_comes_back_letter_for_letter(http_: Http, document: str) -> None:
    make(http_)
    body = b'{"topic": "orders", "payload": ' + document.encode() + b"}"
    assert http_.post("/messages", body).status == 200
    assert b'"payload":' + document.strip().encode() + b"," in http_.get("/messages/orders").body
    log = http_.get("/topics/orders/partitions/0/messages")
    assert b'"payload":' + document.strip().encode() + b"," in log.body


@pytest.mark.parametrize("text", ["", "order data", 'é😀\n\t"\\', "\0", '{"a": 1}', "x" * 100_000, "\u2028\x7f\x1f"])
def test_a_text_comes_back_as_that_text(http_: Http, c: custody.Custody, text: str) -> None:
    make(http_)
    publish(http_, text)
    assert payloads(received(http_)) == [text]
    assert c.read("orders")[0].payload == text, "and is a text for every other door"


@pytest.mark.parametrize("data", [b"", b"\0\xff", bytes(range(256)) * 100])
def test_bytes_come_back_as_bytes(http_: Http, c: custody.Custody, data: bytes) -> None:
    make(http_)
    encoded = base64.b64encode(data).decode()
    assert http_.post("/messages", {"topic": "orders", "payload_base64": encoded}).status == 200
    (message,) = received(http_)
    assert message["payload_base64"] == encoded
    assert "payload" not in message
    assert c.read("orders")[0].payload == data


def test_one_message_with_everything(http_: Http) -> None:
    make(http_, partitions=4)
    body = {"topic": "orders", "payload": {"n": 1}, "key": "SKU-1", "headers": {"trace": "é"}, "routing_key": "a.b"}
    placed = http_.post("/messages", body, headers={"Content-Type": "application/json"})
    assert placed.status == 200
    where = placed.json["partition"]
    assert placed.json == {"topic": "orders", "partition": where, "offset": 0, "duplicate": False}
    (message,) = received(http_)
    assert (message["key"], message["partition"], message["offset"]) == ("SKU-1", where, 0)
    assert message["headers"] == {"trace": "é", "x-custody-routing-key": "a.b"}
    assert (message["attempt"], message["published_at"]) == (1, "2030-01-01T00:00:00Z")


def test_a_body_is_json_whatever_its_content_type(http_: Http) -> None:
    make(http_)
    for kind in ("application/x-www-form-urlencoded", "text/plain", "application/json; charset=utf-8", "nonsense"):
        answer = http_.post("/messages", {"topic": "orders", "payload": kind}, headers={"Content-Type": kind})
        assert answer.status == 200, kind


def test_many_messages_over_several_topics_are_all_or_nothing(http_: Http) -> None:
    make(http_)
    make(http_, "stock", partitions=2)
    messages = [
        {"payload": 1},
        {"topic": "stock", "payload": 2, "partition": 1},
        {"payload": 3, "key": "k"},
    ]
    placed = http_.post("/messages", {"topic": "orders", "messages": messages})
    assert [(one["topic"], one["partition"], one["offset"]) for one in placed.json["receipts"]] == [
        ("orders", 0, 0),
        ("stock", 1, 0),
        ("orders", 0, 1),
    ]
    messages[1]["partition"] = 2
    refused = http_.post("/messages", {"topic": "orders", "messages": messages})
    assert error(refused) == (404, "partition_not_found", None)
    assert http_.get("/topics/orders").json["tails"] == [2]
    assert http_.post("/messages", {"topic": "orders", "messages": []}).json == {"receipts": []}


@pytest.mark.parametrize("count", [64, 65, 1000])
def test_batches_of_every_size_keep_their_order(http_: Http, count: int) -> None:
    make(http_)
    assert [one["offset"] for one in publish(http_, *range(count))] == list(range(count))
    assert payloads(received(http_, max=1000)) == list(range(count))


@pytest.mark.req("C7")
def test_a_conditional_append_is_refused_when_the_partition_has_moved_on(http_: Http) -> None:
    make(http_)
    first = {"topic": "orders", "payload": "mine", "partition": 0, "expected_offset": 0}
    assert http_.post("/messages", first).json["offset"] == 0
    assert error(http_.post("/messages", first)) == (409, "offset_conflict", None)
    many = {"topic": "orders", "messages": [{"payload": n, "partition": 0} for n in range(100)]}
    assert error(http_.post("/messages", {**many, "expected_offset": 0})) == (409, "offset_conflict", None)
    assert http_.post("/messages", {**many, "expected_offset": 1}).status == 200
    assert http_.get("/topics/orders").json["message_count"] == 101


@pytest.mark.req("G16")
def test_priorities_are_all_served_and_told(http_: Http) -> None:
    make(http_, priorities=True)
    for priority in ("background", "low", "normal", "high", "critical"):
        publish(http_, *[priority] * 3, priority=priority)
    served = [message for _ in range(15) for message in received(http_)]
    assert all(message["payload"] == message["priority"] for message in served)
    assert sorted(payloads(served)) == sorted(["background", "low", "normal", "high", "critical"] * 3)
    make(http_, "plain")
    refused = http_.post("/messages", {"topic": "plain", "payload": 1, "priority": "high"})
    assert error(refused)[:2] == (422, "no_priorities")


BAD = [
    (b"", 400, "invalid_json", None),
    (b"{", 400, "invalid_json", None),
    (b"\xff", 400, "invalid_json", None),
    (b'{"topic": "\xff", "payload": 1}', 400, "invalid_json", None),
    (b'{"topic": "orders", "payload": NaN}', 400, "invalid_json", None),
    (b'{"topic": "orders", "payload": 1} x', 400, "invalid_json", None),
    (b'{"topic": "orders", "payload": "\\ud800"}', 400, "invalid_json", None),
    (b'{"topic": "orders", "payload": "\xed\xa0\x80"}', None, None, None),
    (b'{"topic": "orders", "payload": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400, "invalid_json", None),
    (b'{"topic": "orders", "payload": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"}", 400, "invalid_json", None),
    (b'{"topic": "orders", "payload": 1e999}', 422, "invalid_payload", None),
    (b"[]", 422, "invalid_argument", "$"),
    (b"null", 422, "invalid_argument", "$"),
    (b'"orders"', 422, "invalid_argument", "$"),
    (b"5", 422, "invalid_argument", "$"),
    (b'{"topic": "orders"}', 422, "invalid_argument", "$.payload"),
    (b'{"payload": 1}', 422, "invalid_argument", "$.topic"),
    (b'{"topic": "", "payload": 1}', 422, "invalid_argument", "$.topic"),
    (b'{"topic": 5, "payload": 1}', 422, "invalid_argument", "$.topic"),
    (b'{"topic": "a\\u0000", "payload": 1}', 422, "invalid_argument", "$.topic"),
    (b'{"topic": "a b", "payload": 1}', 404, "topic_not_found", None),
    (b'{"topic": "nothing", "payload": 1}', 404, "topic_not_found", None),
    (b'{"topic": "orders", "payload": 1, "payload_base64": ""}', 422, "invalid_argument", "$.payload"),
    (b'{"topic": "orders", "payload_base64": "A"}', 422, "invalid_argument", "$.payload_base64"),
    (b'{"topic": "orders", "payload_base64": 5}', 422, "invalid_argument", "$.payload_base64"),
    (b'{"topic": "orders", "payload": 1, "key": "\\u0000"}', 422, "invalid_argument", "$.key"),
    (b'{"topic": "orders", "payload": 1, "key": 5}', 422, "invalid_argument", "$.key"),
    (b'{"topic": "orders", "payload": 1, "headers": {"a": 5}}', 422, "invalid_argument", "$.headers[...]"),
    (b'{"topic": "orders", "payload": 1, "headers": {"a": "\\u0000"}}', 422, "invalid_argument", "$.headers[...]"),
    (b'{"topic": "orders", "payload": 1, "headers": []}', 422, "invalid_argument", "$.headers"),
    (b'{"topic": "orders", "payload": 1, "partition": -1}', 422, "invalid_argument", "$.partition"),
    (b'{"topic": "orders", "payload": 1, "partition": 0.5}', 422, "invalid_argument", "$.partition"),
    (b'{"topic": "orders", "payload": 1, "partition": 1e400}', None, None, None),
    (b'{"topic": "orders", "payload": 1, "partition": 2147483648}', 422, "invalid_argument", "$.partition"),
    (b'{"topic": "orders", "payload": 1, "partition": 7}', 404, "partition_not_found", None),
    (b'{"topic": "orders", "payload": 1, "priority": "urgent"}', 422, "invalid_argument", "$.priority"),
    (b'{"topic": "orders", "payload": 1, "routing_key": "a..b"}', 422, "invalid_argument", "$.routing_key"),
    (b'{"topic": "orders", "payload": 1, "delay": "soon"}', 422, "invalid_argument", "$.delay"),
    (b'{"topic": "orders", "payload": 1, "delay": -1}', 422, "invalid_argument", "$.delay"),
    (b'{"topic": "orders", "payload": 1, "delay": 1e300}', 422, "invalid_argument", "$.delay"),
    (b'{"topic": "orders", "payload": 1, "delay": true}', 422, "invalid_argument", "$.delay"),
    (b'{"topic": "orders", "payload": 1, "delay": []}', 422, "invalid_argument", "$.delay"),
    (b'{"topic": "orders", "payload": 1, "deliver_at": 5}', 422, "invalid_argument", "$.deliver_at"),
    (b'{"topic": "orders", "payload": 1, "deliver_at": "2030-01-01T00:00:00"}', 422, None, "$.deliver_at"),
    (b'{"topic": "orders", "payload": 1, "deliver_at": "0001-01-01T00:00:00+14:00"}', 422, "invalid_argument", None),
    (b'{"topic": "orders", "payload": 1, "expected_offset": 9223372036854775808}', 422, None, "$.expected_offset"),
    (b'{"topic": "orders", "payload": 1, "paylod": 1}', 422, "invalid_argument", "$.paylod"),
    (b'{"topic": "orders", "messages": {}}', 422, "invalid_argument", "$.messages"),
    (b'{"topic": "orders", "messages": [1]}', 422, "invalid_argument", "$.messages[0]"),
    (b'{"topic": "orders", "messages": [{"payload": 1}, {}]}', 422, "invalid_argument", "$.messages[1].payload"),
    (b'{"messages": [{"payload": 1}]}', 422, "invalid_argument", "$.messages[0].topic"),
    (b'{"topic": "orders", "messages": [{"payload": 1, "x": 1}]}', 422, "invalid_argument", "$.messages[0].x"),
    (b'{"topic": "orders", "messages": [{"payload": 1}], "payload": 2}', 422, "invalid_argument", "$.payload"),
    (b'{"topic": "orders", "messages": [{"payload": 1}], "key": "k"}', 422, "invalid_argument", "$.key"),
    (b'{"topic": "orders", "payload": 1, "first": 0}', 422, "invalid_argument", None),
    (b'{"topic": "orders", "payload": 1, "transaction_id": "x"}', 422, "invalid_argument", "$.transaction_id"),
]


@pytest.mark.req("G20")
def test_what_cannot_be_published_is_refused_and_leaves_nothing(http_: Http) -> None:
    make(http_)
    for body, status, code, path in BAD:
        answer = http_.post("/messages", body)
        shown = body[:100]
        if status is None:
            assert 400 <= answer.status < 500, shown
            continue
        assert answer.status == status, (shown, answer.body)
        assert code is None or answer.code == code, (shown, answer.body)
        assert answer.json["error"].get("path") == path, (shown, answer.body)
    assert http_.get("/topics/orders").json["message_count"] == 0


@pytest.mark.req("G20")
def test_a_refusal_in_company_is_its_own(http_: Http) -> None:
    """Requests that share a transaction: one of them is bad, and the others are as if it were not there."""
    from concurrent.futures import ThreadPoolExecutor

    make(http_)
    bodies = [{"topic": "orders", "payload": n, **({"partition": 9} if n % 5 == 0 else {})} for n in range(50)]
    with ThreadPoolExecutor(10) as pool:
        answers = list(pool.map(lambda body: http_.post("/messages", body), bodies))
    assert [answer.status for answer in answers] == [404 if n % 5 == 0 else 200 for n in range(50)]
    assert sorted(payloads(received(http_, max=100))) == [n for n in range(50) if n % 5]


def test_the_log_is_read_by_offset_and_time(http_: Http) -> None:
    make(http_)
    publish(http_, *range(5))
    log = "/topics/orders/partitions/0/messages"
    assert payloads(http_.get(f"{log}?offset=3").json) == [3, 4]
    assert payloads(http_.get(f"{log}?offset=1&max=2").json) == [1, 2]
    assert payloads(http_.get(f"{log}?time=2030-01-01T00:00:00Z").json) == [0, 1, 2, 3, 4]
    assert http_.get(f"{log}?time=2030-01-02T00:00:00Z").json == []
    assert {message["attempt"] for message in http_.get(log).json} == {0}
    assert all("receipt" not in message for message in http_.get(log).json)
    assert error(http_.get(f"{log}?time=2030-01-01")) == (422, "invalid_argument", "$.time")
    assert error(http_.get(f"{log}?offset={2**63 - 1}")) == (422, "invalid_argument", "$.offset")
    assert error(http_.get("/topics/orders/partitions/9/messages")) == (404, "partition_not_found", None)
    assert json.loads(http_.get(log).body)[0]["headers"] == {}
