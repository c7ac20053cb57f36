"""What tests of the HTTP door do again and again."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

from tests.http.conftest import Http, Response


def make(door: Http, topic: str = "orders", *, group: str | None = None, **rest: Any) -> None:
    """A topic; with a group, that too: `policy` and `start` are the group's."""
    of_group = {name: rest.pop(name) for name in ("policy", "start") if name in rest}
    assert door.post("/topics", {"name": topic, **rest}).status == 201
    if group is not None:
        assert door.post(f"/topics/{topic}/groups", {"name": group, **of_group}).status == 201


def publish(door: Http, *payloads: Any, topic: str = "orders", **rest: Any) -> list[dict[str, Any]]:
    """The receipts of some messages, published in one request."""
    answer = door.post("/messages", {"topic": topic, "messages": [{"payload": one, **rest} for one in payloads]})
    assert answer.status == 200, answer.body
    receipts: list[dict[str, Any]] = answer.json["receipts"]
    return receipts


def receive(door: Http, topic: str = "orders", **query: Any) -> Response:
    return door.get(f"/messages/{topic}?{urlencode(query)}")


def received(door: Http, topic: str = "orders", **query: Any) -> list[dict[str, Any]]:
    """The messages that are received."""
    answer = receive(door, topic, **query)
    assert answer.status == 200, answer.body
    messages: list[dict[str, Any]] = answer.json["messages"]
    return messages


def payloads(messages: list[dict[str, Any]]) -> list[Any]:
    return [message["payload"] for message in messages]


def place(message: dict[str, Any]) -> dict[str, Any]:
    """A message by its place alone."""
    return {name: message[name] for name in ("topic", "partition", "offset")}


def error(answer: Response) -> tuple[int, str, str | None]:
    """The status, the code and the path of an error."""
    body = answer.json["error"]
    assert body["message"]
    assert body["request_id"] == answer.headers["x-request-id"]
    return answer.status, body["code"], body.get("path")
