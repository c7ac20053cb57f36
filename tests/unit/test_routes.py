"""Which operation a path calls."""

from __future__ import annotations

import pytest

from custody.http.operation import Table
from custody.http.routes import Routes

table = Table("test")


def operation(method: str, path: str, name: str) -> None:
    async def handler(_call: object) -> None: ...

    handler.__name__ = name
    table.operation(method, path, answer=None)(handler)


operation("GET", "/topics", "list_topics")
operation("POST", "/topics", "create_topic")
operation("GET", "/messages/next", "next_message")
operation("GET", "/messages/{topic}", "receive")
operation("GET", "/messages/{topic}/{partition}", "receive_of_partition")
operation("DELETE", "/producers/{producer_id}", "delete_producer")
operation("GET", "/files/a.b", "dotted")

routes = Routes(table.operations)


@pytest.mark.req("G20")
@pytest.mark.parametrize(
    ("method", "path", "name", "params"),
    [
        ("GET", "/topics", "list_topics", {}),
        ("POST", "/topics", "create_topic", {}),
        ("GET", "/messages/next", "next_message", {}),
        ("GET", "/messages/orders", "receive", {"topic": "orders"}),
        ("GET", "/messages/a\nb", "receive", {"topic": "a\nb"}),
        ("GET", "/messages/orders/3", "receive_of_partition", {"topic": "orders", "partition": "3"}),
        ("DELETE", "/producers/a/b\nc", "delete_producer", {"producer_id": "a/b\nc"}),
    ],
)
def test_a_path_calls_the_first_operation_that_it_fits(
    method: str, path: str, name: str, params: dict[str, str]
) -> None:
    found = routes.find(method, path)
    assert found is not None
    assert (found[0].name, found[1]) == (name, params)


@pytest.mark.req("G20")
@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("DELETE", "/topics", ["GET", "POST"]),
        ("HEAD", "/messages/orders", ["GET"]),
        ("GET", "/producers/a/b", ["DELETE"]),
        ("GET", "/topics/", []),
        ("GET", "/topics\n", []),
        ("GET", "/messages/", []),
        ("GET", "/messages//3", []),
        ("GET", "/messages/orders/3/4", []),
        ("DELETE", "/producers/", []),
        ("GET", "/files/a-b", []),
        ("GET", "/", []),
        ("GET", "", []),
    ],
)
def test_a_call_that_there_is_not(method: str, path: str, allowed: list[str]) -> None:
    assert routes.find(method, path) is None
    assert [operation.method for operation in routes.at(path)] == allowed
