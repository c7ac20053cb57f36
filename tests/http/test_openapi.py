"""The description of the interface holds: what is generated from it is answered as it says, and never by a failure."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import jsonschema_rs
import msgspec
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import Case, GenerationMode
from schemathesis.checks import load_all_checks
from schemathesis.core import NotSet
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from tests.http.conftest import Http

import custody
from custody.errors import TopicNotFound, Transient, by_code
from custody.http.app import OPERATIONS

load_all_checks()

CHECKS = [status_code_conformance, content_type_conformance, response_schema_conformance]
NOT_NOW = {code for code, kind in by_code().items() if issubclass(kind, Transient) and kind.status == 503} - {
    "database_unavailable"
}
"""A paused group and a breaker that is open are answers, not failures."""


class Surroundings:
    """Things that exist, so that generated calls meet more than nothing."""

    def __init__(self, c: custody.Custody) -> None:
        self._c = c
        self.known: dict[str, list[Any]] = {}

    def make(self) -> None:
        """Makes what a call before may have removed or used up."""
        c = self._c
        for topic in ("orders", "orders-dlq", "urgent"):
            with suppress(TopicNotFound):
                c.delete_topic(topic)
        c.create_topic("orders", partitions=2)
        c.create_topic("urgent", priorities=True)
        c.create_group("orders", "default", custody.Policy(max_attempts=1, dead_letter="topic"))
        c.create_group("orders", "ordered", custody.Policy(ordering="key", on_dead="hold"))
        c.create_group("orders", "bare", bare=True)
        for number in range(6):
            c.publish("orders", {"number": number}, key=f"key-{number % 3}", partition=0, allow_split=True)
        later = c.publish("orders", b"\x00\xff", delay=timedelta(days=1))
        for group in ("ordered", "default"):
            lease = c.claim("orders", group, partition=0, max_messages=4, visibility_timeout="1h")
            lease.nack(lease.messages[0], error="refused", requeue=False)
        lease_id, offsets = str(lease.lease_id), [message.offset for message in lease.messages]
        producer = c.init_producer("service")
        begun, _ = c.transactions.begin("service", epoch=None, timeout=None)
        self.known = {
            "topic": ["orders", "orders", "urgent", "orders-dlq"],
            "dlq_topic": ["orders-dlq"],
            "target_topic": ["orders"],
            "group": ["default", "ordered", "bare"],
            "partition": [0, 1],
            "offset": [0, *offsets],
            "offsets": [offsets, offsets[1:2]],
            "lease_id": [lease_id],
            "receipt": [f"{lease_id}:{offset}" for offset in offsets],
            "ack": [lease_id, f"{lease_id}:{offsets[1]}"],
            "delay_id": [getattr(later, "delay_id", 0)],
            "producer_id": ["service"],
            "epoch": [producer.epoch],
            "sequence": [0, 1],
            "transaction_id": [str(begun)],
            "key": ["key-0", "key-1"],
            "next_offset": [1],
        }

    def put_into(self, value: Any, dice: random.Random) -> Any:
        """The value with some of its fields naming things that exist."""
        if isinstance(value, list):
            return [self.put_into(one, dice) for one in value]
        if not isinstance(value, dict):
            return value
        return {
            name: dice.choice(self.known[name])
            if name in self.known and dice.random() < 0.6
            else self.put_into(one, dice)
            for name, one in value.items()
        }


class Run:
    """Generated calls of every operation, and what came of them."""

    def __init__(self, c: custody.Custody, door: Http) -> None:
        self._door, self._surroundings = door, Surroundings(c)
        self._session = requests.Session()
        self._dice = random.Random(17)
        self.statuses: Counter[int] = Counter()
        self.failures: list[str] = []

    def operation(self, operation: Any, mode: GenerationMode, cases: int) -> None:
        @seed(17)
        @settings(
            max_examples=cases,
            phases=[Phase.generate],
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def calls(case: Case) -> None:
            self._call(case)

        if mode is GenerationMode.POSITIVE:  # what is malformed needs them less, and leaves them as they are
            self._surroundings.make()
        calls()

    def _call(self, case: Case) -> None:
        put, dice = self._surroundings.put_into, self._dice
        case.path_parameters = put(dict(case.path_parameters), dice)
        case.query = put(dict(case.query), dice)
        if not isinstance(case.body, NotSet):
            case.body = put(case.body, dice)
        response = case.call(session=self._session, base_url=self._door.url, timeout=20)
        self.statuses[response.status_code] += 1
        if response.status_code >= 500 and response.json()["error"]["code"] not in NOT_NOW:
            self.failures.append(f"{case.as_curl_command()}\n{response.status_code} {response.text}")
            return
        if response.status_code in (429, 503) and "retry-after" not in response.headers:
            self.failures.append(f"{case.as_curl_command()}\nhas no Retry-After")
        try:
            case.validate_response(response, checks=CHECKS)
        except AssertionError as error:
            self.failures.append(str(error))
        except BaseExceptionGroup as errors:
            self.failures.append("\n".join(str(error) for error in errors.exceptions))


# the server in its thread uses `random`, which hypothesis takes for the strategy's own doing
@pytest.mark.filterwarnings("ignore:Do not use the `random` module")
@pytest.mark.req("G18", "G20")
@pytest.mark.parametrize(
    ("positive", "negative", "least"),
    [
        pytest.param(1, 1, 80, id="some"),
        pytest.param(5, 5, 400, id="more", marks=pytest.mark.chaos),
        pytest.param(300, 200, 10_000, id="many", marks=[pytest.mark.long, pytest.mark.timeout(3600)]),
    ],
)
def test_every_call_is_answered_as_it_is_described(
    c: custody.Custody, serve: Callable[..., Http], positive: int, negative: int, least: int
) -> None:
    door = serve(max_wait="10ms")
    schema = schemathesis.openapi.from_url(f"{door.url}/openapi.json")
    run = Run(c, door)
    operations = [found.ok() for found in schema.get_all_operations()]
    for operation in operations:
        run.operation(operation, GenerationMode.POSITIVE, positive)
        if operation.body or operation.query or any(name in operation.path for name in ("{partition}", "{delay_id}")):
            run.operation(operation, GenerationMode.NEGATIVE, negative)
    print(f"{run.statuses.total()} cases of {len(operations)} operations: {sorted(run.statuses.items())}")
    assert run.statuses.total() >= least, "a run that generates little shows little"
    assert not run.failures, f"{len(run.failures)} of {run.statuses.total()} cases:\n" + "\n\n".join(run.failures[:5])
    assert run.statuses[200] > run.statuses.total() / 20, run.statuses


@pytest.fixture
def document(http_: Http) -> dict[str, Any]:
    found: dict[str, Any] = http_.get("/openapi.json").json
    return found


def described(document: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [(f"{method} {path}", one) for path, calls in document["paths"].items() for method, one in calls.items()]


@pytest.mark.req("G18")
def test_every_call_is_described_with_its_parameters_bodies_and_errors(document: dict[str, Any]) -> None:
    assert len(described(document)) == len(OPERATIONS) > 50
    for name, call in described(document):
        assert call["summary"], name
        assert [one["name"] for one in call["parameters"] if not one.get("description")] == [], name
        if "requestBody" in call:
            schema = call["requestBody"]["content"]["application/json"]["schema"]
            assert document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]["description"], name
            assert {"400", "413", "422"} <= set(call["responses"]), name
        for status, answer in call["responses"].items():
            assert answer["description"], (name, status)
            if int(status) >= 400:
                assert answer["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/ErrorOut"}
            assert ("Retry-After" in answer.get("headers", {})) == (status in ("429", "503")), (name, status)
            assert status == "204" or answer["content"], (name, status)


@pytest.mark.req("G18")
def test_every_body_has_an_example_that_its_schema_and_the_server_take(document: dict[str, Any]) -> None:
    components = {"components": document["components"]}
    bodies = [(name, call["requestBody"]) for name, call in described(document) if "requestBody" in call]
    assert len(bodies) > 25
    for name, body in bodies:
        content = body["content"]["application/json"]
        validator = jsonschema_rs.validator_for({**content["schema"], **components})
        assert [str(error) for error in validator.iter_errors(content["example"])] == [], name
        assert not validator.is_valid({**content["example"], "no_such_field": 1}), name
    for operation in OPERATIONS:
        if operation.body is not None:
            operation.decode(msgspec.json.encode(operation.example))


@pytest.mark.req("G18")
def test_every_answer_has_an_example_that_fits_its_schema(document: dict[str, Any]) -> None:
    components = {"components": document["components"]}
    contents = [
        (name, content)
        for name, call in described(document)
        for status, answer in call["responses"].items()
        if int(status) < 400
        for content in answer.get("content", {}).values()
    ]
    assert len(contents) > 45
    for name, content in contents:
        validator = jsonschema_rs.validator_for({**content["schema"], **components}, validate_formats=True)
        assert [str(error) for error in validator.iter_errors(content["example"])] == [], name


@pytest.mark.req("G18")
def test_the_page_at_docs_shows_every_call_and_loads_nothing_else(http_: Http) -> None:
    page = http_.get("/docs")
    assert (page.status, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    text = page.body.decode()
    for operation in OPERATIONS:
        assert f"id='{operation.name}'" in text
    assert "src=" not in text
    assert "<script" not in text
    assert "Annotated" not in text
    assert "http://" not in text


def test_an_operation_has_one_name(document: dict[str, Any]) -> None:
    names = [call["operationId"] for _, call in described(document)]
    assert sorted(set(names)) == sorted(names)
