"""Arguments that are more than a word."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
import typer

from custody import Constant, Exponential, Linear
from custody.cli import arguments, render
from custody.model.policy import Breaker


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("exponential", Exponential()),
        ("exponential:2s:cap=5m", Exponential("2s", cap="5m")),
        ("exponential:multiplier=3:jitter=0.5", Exponential(multiplier=3, jitter=0.5)),
        ("linear:1s", Linear("1s")),
        ("constant:500ms", Constant("500ms")),
    ],
)
def test_backoffs(text: str, expected: object) -> None:
    assert arguments.backoff(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("on", Breaker()), ("off", None), ("0.3:window=1m", Breaker(failure_rate=0.3, window="1m"))],
)
def test_breakers(text: str, expected: object) -> None:
    assert arguments.breaker(text) == expected


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (arguments.backoff, "quadratic"),
        (arguments.backoff, "linear:1s:multiplier=2"),
        (arguments.backoff, "exponential:soon"),
        (arguments.backoff, "exponential:1s:jitter=much"),
        (arguments.backoff, "exponential:1s:jitter=7"),
        (arguments.breaker, "often"),
        (arguments.breaker, "0.5:windwo=1s"),
        (arguments.time, "tomorrow"),
        (arguments.time, "12"),
        (arguments.number, "many"),
        (arguments.header, "no-value"),
        (arguments.header, "=x"),
        (arguments.duration, "-1s"),
    ],
)
def test_what_is_refused_as_usage(parse, text: str) -> None:
    with pytest.raises(typer.BadParameter):
        parse(text)


def test_times() -> None:
    assert arguments.time("2030-01-31T12:00:00Z") == datetime(2030, 1, 31, 12, tzinfo=UTC)
    assert arguments.time("2030-01-31").tzinfo is not None
    before = datetime.now(UTC)
    assert before <= arguments.time("15m") + timedelta(minutes=15) <= datetime.now(UTC)


@pytest.mark.parametrize(
    ("value", "expected"),
    [(None, "–"), (0.0123, "12.3 ms"), (3.4, "3.4 s"), (300, "5 min"), (9000, "2.5 h"), (timedelta(days=3), "3 d")],
)
def test_durations_for_people(value: float | timedelta | None, expected: str) -> None:
    assert render.span(value) == expected
