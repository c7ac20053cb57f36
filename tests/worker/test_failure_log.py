"""What a handler raises is logged with its traceback: each kind of error once a minute."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from uuid import UUID

import pytest

from custody import Message, Retry
from custody.worker.failure_log import AGAIN, FailureLog


def message(offset: int) -> Message:
    return Message(
        topic="orders",
        partition=0,
        offset=offset,
        key=None,
        payload=None,
        headers={},
        attempt=2,
        published_at=datetime(2030, 1, 1, tzinfo=UTC),
        topic_uid=UUID(int=0),
    )


def handler(offset: int) -> None:
    if offset % 2:
        raise KeyError(offset)
    raise ValueError(f"secret of {offset}")


def failure(offset: int) -> BaseException:
    try:
        handler(offset)
    except Exception as error:
        return error
    raise AssertionError("it did not fail")


def test_each_kind_is_logged_once_and_counted_then(caplog: pytest.LogCaptureFixture) -> None:
    now = 1000.0
    log = FailureLog(clock=lambda: now)
    with caplog.at_level(logging.WARNING, "custody"):
        for offset in range(10):
            log.add(message(offset), failure(offset))
        assert [record.getMessage() for record in caplog.records] == [
            "the handler failed on orders/0/0 (attempt 2)",
            "the handler failed on orders/0/1 (attempt 2)",
        ]
        assert "ValueError: secret of 0" in caplog.text
        assert "in handler" in caplog.text
        caplog.clear()
        now += AGAIN
        log.add(message(10), failure(10))
    assert [record.getMessage() for record in caplog.records] == [
        "the handler failed on orders/0/10 (attempt 2), and 4 times like this since it was logged last"
    ]


def test_a_decision_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "custody"):
        FailureLog().add(message(0), Retry("throttled"))
    assert caplog.records == []


def test_as_many_kinds_as_there_are_lines_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    log = FailureLog()
    with caplog.at_level(logging.WARNING, "custody"):
        for n in range(1500):
            log.add(message(n), type(f"Error{n}", (Exception,), {})())
    assert len(caplog.records) == 1500
    assert len(log._logged) == 1000
