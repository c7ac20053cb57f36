"""The command line with the URL of a server in place of a database."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.cli.conftest import Run
from tests.http.conftest import Http, served

import custody


@pytest.fixture
def server(c: custody.Custody) -> Iterator[Http]:
    with served(c) as running:
        yield running


@pytest.mark.core
def test_commands_work_through_a_server(quick: Run, server: Http) -> None:
    def told(*arguments: str) -> str:
        answer = quick("--database", server.url, *arguments)
        assert answer.code == 0, answer
        return answer.out

    told("topics", "create", "orders")
    told("groups", "create", "orders", "stock")
    assert "2 messages" in told("publish", "orders", "1", "2", "--key", "k")
    assert told("consume", "orders", "stock").splitlines() == ["0/0  key=k  1", "0/1  key=k  2"]
    assert "orders" in told("topics", "list")
    assert "done" in told("trace", "orders", "0", "0")
    assert "paused" in told("pause", "orders", "stock")


@pytest.mark.parametrize("command", [("outbox", "stats"), ("migrate",), ("serve", "--port", "0")])
def test_commands_that_need_the_database_say_so(quick: Run, server: Http, command: tuple[str, ...]) -> None:
    answer = quick("--json", "--database", server.url, *command, code=1)
    assert (answer.code, answer.error["code"]) == (1, "needs_database")
