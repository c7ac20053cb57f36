"""Calls as people write them by hand with curl: bare bodies, places in place of receipts."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest
from tests.conftest import Clock
from tests.http.conftest import Http
from tests.http.steps import make, publish, received

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl here")


def curl(door: Http, *arguments: str) -> str:
    """What curl prints; an error status is a failure."""
    at = [argument.replace("http://localhost:8080", door.url) for argument in arguments]
    done = subprocess.run(
        ["curl", "--silent", "--show-error", "--fail-with-body", *at],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 0, (arguments, done.stdout, done.stderr)
    return done.stdout


PLACE = '"topic": "orders",\n"partition": 0,\n"offset": 42'


@pytest.fixture
def door(http_: Http, clock: Clock) -> Http:
    """Offset 42 of orders is the next one, and five are dead."""
    make(http_, group="default", policy={"dead_letter": "topic"})
    publish(http_, *range(43))
    for _ in range(5):
        refused = {"receipt": received(http_)[0]["receipt"], "requeue": False}
        assert http_.post("/messages/nack", refused).status == 200
    for _ in range(37):
        received(http_, auto_ack="true")
    return http_


@pytest.mark.req("G4", "G5", "G7")
def test_receive_extend_and_ack(door: Http) -> None:
    got = curl(door, "-X", "GET", "http://localhost:8080/messages/orders/0?visibility_timeout=60s")
    assert '"offset":42' in got
    extend = f'{{\n{PLACE},\n"timeout_seconds": 60\n}}'
    assert "deadline" in curl(door, "-X", "POST", "http://localhost:8080/messages/extend-visibility", "-d", extend)
    ack = ("-X", "POST", "http://localhost:8080/messages/ack", "-H", "Content-Type: application/json")
    assert '"settled":1' in curl(door, *ack, "-d", f"{{\n{PLACE}\n}}")


@pytest.mark.req("G6", "G13")
def test_nack_with_retry(door: Http, clock: Clock) -> None:
    received(door)
    assert '"in_flight_count":1' in curl(door, "http://localhost:8080/topics/orders/inflight")
    nack = f'{{\n{PLACE},\n"requeue": true\n}}'
    assert '"dead":[]' in curl(door, "-X", "POST", "http://localhost:8080/messages/nack", "-d", nack)
    clock.move(0.1)
    assert received(door)[0]["attempt"] == 2


@pytest.mark.req("G6", "G10")
def test_nack_without_retry_and_replay(door: Http) -> None:
    received(door)
    nack = f'{{\n{PLACE},\n"requeue": false\n}}'
    assert '"dead":[42]' in curl(door, "-X", "POST", "http://localhost:8080/messages/nack", "-d", nack)
    topics = json.loads(curl(door, "http://localhost:8080/topics"))
    assert [topic["name"] for topic in topics if topic["name"].endswith("-dlq")] == ["orders-dlq"]
    assert '"message_count":6' in curl(door, "http://localhost:8080/topics/orders-dlq")
    assert '"payload":0' in curl(door, "http://localhost:8080/messages/orders-dlq/0")
    replay = '{\n"dlq_topic": "orders-dlq",\n"partition": 0,\n"offset": 5,\n"target_topic": "orders"\n}'
    assert '"offset":43' in curl(door, "-X", "POST", "http://localhost:8080/messages/dlq/replay", "-d", replay)


@pytest.mark.req("G11", "G12")
def test_an_idempotent_producer_and_its_transaction(door: Http) -> None:
    make(door, "inventory")
    init = '{\n"producer_id": "order-service-1",\n"idempotent": true\n}'
    made = curl(door, "-X", "POST", "http://localhost:8080/producers/init", "-d", init)
    assert made.startswith('{"producer_id":"order-service-1","epoch":1')
    message = (
        '{\n"topic": "orders",\n"producer_id": "order-service-1",\n"epoch": 1,\n"sequence": 0,\n'
        '"payload": "order data"\n}'
    )
    assert '"duplicate":false' in curl(door, "-X", "POST", "http://localhost:8080/messages", "-d", message)
    begun = curl(
        door,
        "-X",
        "POST",
        "http://localhost:8080/transactions/begin",
        "-d",
        '{"producer_id": "order-service-1"}',
    )
    transaction = begun.split('"')[3]
    several = (
        f'{{\n"transaction_id": "{transaction}",\n"messages": [\n{{"topic": "orders", "payload": "order1"}},\n'
        '{"topic": "inventory", "payload": "reserve1"}\n]\n}'
    )
    assert '"messages":2' in curl(door, "-X", "POST", "http://localhost:8080/messages", "-d", several)
    commit = f'{{"transaction_id": "{transaction}"}}'
    assert '"receipts":[' in curl(door, "-X", "POST", "http://localhost:8080/transactions/commit", "-d", commit)
    assert received(door, "inventory")[0]["payload"] == "reserve1"
