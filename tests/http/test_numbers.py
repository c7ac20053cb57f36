"""Numbers out of range: each number of each call that the document describes. A new call is tried by itself."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote

import pytest
from tests.http.conftest import Http

import custody

pytestmark = [pytest.mark.core, pytest.mark.req("G20")]

NUMBERS = ["-1", "0", "1.5", "2147483648", "9223372036854775808", "18446744073709551616", "1e400", "-1e400", "1e308"]
OF_NO_SENSE = ["NaN", "Infinity", "true", '"many"', "[1]", "{}"]
PLACES = {
    "topic": "orders",
    "group": "stock",
    "partition": "0",
    "offset": "0",
    "delay_id": "1",
    "producer_id": "p",
    "name": "nightly",
}


class Document:
    """What /openapi.json says of numbers."""

    def __init__(self, http: Http) -> None:
        self._document: dict[str, Any] = http.get("/openapi.json").json

    def calls(self) -> Iterator[tuple[str, str, dict[str, Any]]]:
        for path, methods in self._document["paths"].items():
            for method, call in methods.items():
                if path != "/metrics":
                    yield method.upper(), path, call

    def resolved(self, schema: dict[str, Any]) -> dict[str, Any]:
        if "$ref" not in schema:
            return schema
        found: dict[str, Any] = self._document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        return found

    def is_number(self, schema: dict[str, Any]) -> bool:
        schema = self.resolved(schema)
        return schema.get("type") in ("integer", "number") or any(
            self.is_number(one) for one in (*schema.get("anyOf", ()), *schema.get("allOf", ()))
        )

    def numbers(self, schema: dict[str, Any]) -> list[str]:
        return [name for name, one in self.resolved(schema).get("properties", {}).items() if self.is_number(one)]


def tried(http: Http, method: str, path: str, body: str | None = None) -> str | None:
    """What is wrong with the answer."""
    answer = http(method, path, None if body is None else body.encode())
    if answer.status >= 500:
        return f"{method} {path} {body}: {answer.status} {answer.body.decode()}"
    if answer.status == 422 and "path" not in answer.json["error"] and answer.code == "invalid_argument":
        said = answer.json["error"]["message"]
        if any(foreign in said for foreign in ("out of range", "does not exist", "bigint", "numeric", "syntax")):
            return f"{method} {path} {body}: {said}"
    return None


def test_every_number_of_every_call(c: custody.Custody, serve: Callable[..., Http]) -> None:
    http_ = serve(max_wait="10ms")
    c.create_topic("orders")
    c.create_group("orders", "stock")
    c.init_producer("p")
    document = Document(http_)
    found, count = [], 0
    for method, path, call in document.calls():
        parameters = call["parameters"]
        for one in parameters:
            if not document.is_number(one["schema"]):
                continue
            for number in [*NUMBERS, *OF_NO_SENSE]:
                places = {**PLACES, **({one["name"]: number} if one["in"] == "path" else {})}
                where = path.format_map({name: quote(value, safe="") for name, value in places.items()})
                query = f"?{one['name']}={quote(number, safe='')}" if one["in"] == "query" else ""
                found.append(tried(http_, method, where + query, "{}" if "requestBody" in call else None))
                count += 1
        if "requestBody" in call:
            content = call["requestBody"]["content"]["application/json"]
            where = path.format_map(PLACES)
            for name in document.numbers(content["schema"]):
                for number in [*NUMBERS, *OF_NO_SENSE]:
                    rest = {key: value for key, value in content["example"].items() if key != name}
                    body = json.dumps({**rest, name: "@"}).replace('"@"', number)
                    found.append(tried(http_, method, where, body))
                    count += 1
    assert [one for one in found if one is not None] == []
    assert count > 500, "the document has many numbers"
