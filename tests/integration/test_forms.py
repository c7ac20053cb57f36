"""What is written by SQL has a form that every reader can decode; anything else is refused, with a remedy."""

from __future__ import annotations

import psycopg
import pytest

import custody

pytestmark = [pytest.mark.core, pytest.mark.req("G20")]

HEADERS = ("[1]", '"x"', '{"a": 1}', '{"a": null}', '{"a": {"b": "c"}}', "null")


def refused(db: psycopg.Connection, statement: str, *values: object) -> tuple[str, str]:
    """The code and the message of a refusal, which has a remedy."""
    with pytest.raises(psycopg.Error) as caught, db.transaction():
        db.execute(statement, values)
    assert caught.value.sqlstate == "CY000", str(caught.value)
    assert caught.value.diag.message_hint
    return str(caught.value.diag.message_detail), str(caught.value.diag.message_primary)


@pytest.mark.parametrize("headers", HEADERS)
def test_headers_are_texts(c: custody.Custody, db: psycopg.Connection, headers: str) -> None:
    c.create_topic("orders")
    wrong = ("invalid_argument", "headers are an object of texts")
    payload = b"1"
    for statement, values in (
        ("SELECT custody.send('orders', '1', p_headers => %s)", [headers]),
        ("SELECT custody.publish('orders', '{0}', '{k}', '{j}', ARRAY[%s::bytea], ARRAY[%s])", [payload, headers]),
        (
            "SELECT custody.publish_delayed('orders', '{0}', '{k}', '{j}', ARRAY[%s::bytea], ARRAY[%s],"
            " ARRAY[now()], ARRAY[NULL::float8])",
            [payload, headers],
        ),
        ("SELECT custody.outbox_write('x', '1', 'orders', %s)", [headers]),
    ):
        assert refused(db, statement, *values) == wrong
    assert c.topic("orders").message_count == 0
    assert c.delayed_count("orders") == 0


@pytest.mark.parametrize(
    ("kind", "payload", "code"),
    [
        ("j", b"{x", "invalid_payload"),
        ("j", b"", "invalid_payload"),
        ("j", b"\xff", "invalid_payload"),
        ("j", b'"\0"', "invalid_payload"),
        ("t", b"\xff", "invalid_payload"),
        ("q", b"1", "invalid_argument"),
        (None, b"1", "invalid_argument"),
        ("b", None, "invalid_argument"),
    ],
)
def test_a_payload_is_what_its_kind_says(
    c: custody.Custody, db: psycopg.Connection, kind: str | None, payload: bytes | None, code: str
) -> None:
    c.create_topic("orders")
    found, _ = refused(
        db, "SELECT custody.publish('orders', '{0}', '{k}', ARRAY[%s], ARRAY[%s::bytea], '{NULL}')", kind, payload
    )
    assert found == code
    assert c.topic("orders").message_count == 0


@pytest.mark.parametrize("partitions", ["{0}", "{0,0,0}", "{}"])
def test_arrays_of_different_lengths_are_refused(c: custody.Custody, db: psycopg.Connection, partitions: str) -> None:
    c.create_topic("orders")
    found, _ = refused(
        db,
        "SELECT custody.publish('orders', %s, '{k,k}', '{j,j}', ARRAY['1'::bytea, '2'], '{NULL,NULL}')",
        partitions,
    )
    assert found == "invalid_argument"
    assert c.topic("orders").message_count == 0


def test_what_has_its_form_is_taken_and_read(c: custody.Custody, db: psycopg.Connection) -> None:
    c.create_topic("orders")
    for kind, payload, headers in (
        ("j", b'{"a": "\\u0000"}', None),
        ("j", b"null", "{}"),
        ("t", b"a\0b", '{"a": "1"}'),
        ("b", b"\xff", None),
    ):
        db.execute(
            "SELECT custody.publish('orders', '{0}', '{k}', ARRAY[%s], ARRAY[%s::bytea], ARRAY[%s])",
            [kind, payload, headers],
        )
    messages = c.read("orders")
    assert [message.payload for message in messages] == [{"a": "\0"}, None, "a\0b", b"\xff"]
    assert [message.headers for message in messages] == [{}, {}, {"a": "1"}, {}]


def test_no_table_takes_what_no_reader_can_decode(c: custody.Custody, db: psycopg.Connection) -> None:
    c.create_topic("orders")
    insert = (
        'INSERT INTO custody.log_1 (segment_id, partition, "offset", published_at, kind, payload, headers)'
        " VALUES (1, 0, 0, now(), %s, '1', %s)"
    )
    for kind, headers in (("q", None), ("j", "[1]")):
        with pytest.raises(psycopg.errors.CheckViolation) as caught, db.transaction():
            db.execute(insert, [kind, headers])
        assert caught.value.diag.constraint_name == "message_form"


@pytest.mark.parametrize("time", ["infinity", "10000-01-01Z", "0002-01-01 BC"])
def test_a_delayed_message_has_a_time_that_clients_can_read(
    c: custody.Custody, db: psycopg.Connection, time: str
) -> None:
    c.create_topic("orders")
    delay = (
        "SELECT custody.publish_delayed('orders', '{0}', '{k}', '{j}', ARRAY['1'::bytea], '{NULL}',"
        " ARRAY[%s::timestamptz], '{NULL}')"
    )
    assert refused(db, delay, time)[0] == "invalid_argument"
    assert c.delayed("orders") == []


def test_a_policy_has_its_form(c: custody.Custody, db: psycopg.Connection) -> None:
    c.create_topic("orders")
    make = "SELECT custody.create_group('orders', 'g', %s)"

    def made(policy: object) -> tuple[str, str]:
        return refused(db, make, psycopg.types.json.Jsonb(policy))

    for policy in ([1], "x", 1, None):
        assert made(policy) == ("invalid_policy", "a policy is an object")
    assert made({"max_attempt": 3}) == ("invalid_policy", "a policy has no max_attempt")
    assert made({"group_id": 1, "paused": True})[1] == "a policy has no group_id, paused"
    assert made({"on_dead": None})[1] == "the policy has no value for on_dead"
    assert c.groups("orders") == []
    db.execute(make, [psycopg.types.json.Jsonb({"max_attempts": 5})])
    change = "SELECT custody.update_group('orders', 'g', %s)"
    assert refused(db, change, psycopg.types.json.Jsonb({"max_attempt": 3}))[1] == "a policy has no max_attempt"
    assert refused(db, change, psycopg.types.json.Jsonb({"max_attempts": None}))[1].endswith("for max_attempts")
    assert refused(db, change, psycopg.types.json.Jsonb([]))[1] == "a policy is an object"
    db.execute(change, [psycopg.types.json.Jsonb({"max_attempts": 7})])
    assert c.group("orders", "g").policy.max_attempts == 7


@pytest.mark.parametrize("bindings", ['"x"', '{"a": 1}', "[null]", '[{"pattern": 1}]', '[{"headers": {"a": null}}]'])
def test_bindings_have_their_form(c: custody.Custody, db: psycopg.Connection, bindings: str) -> None:
    c.create_topic("orders")
    c.create_group("orders", "g")
    assert refused(db, "SELECT custody.bind('orders', 'g', %s)", bindings)[0] == "invalid_argument"
