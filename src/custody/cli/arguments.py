"""Parsers of arguments: times, starts, backoffs, breakers, headers. An invalid one is a usage error."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, TypeVar

import typer

from custody.cli import completion
from custody.errors import CustodyError, did_you_mean
from custody.model.policy import BACKOFFS, Backoff, Breaker, seconds
from custody.model.retention import size_in_bytes
from custody.model.routing import Binding
from custody.model.setting import Settings, settings_of
from custody.outbox import EventState

Start = str | int | datetime
T = TypeVar("T")


def _usage(parse: Callable[[str], T]) -> Callable[[str], T]:
    """Turns a refusal of Custody into a usage error with the same message."""

    def parsed(text: str) -> T:
        try:
            return parse(text)
        except CustodyError as error:
            raise typer.BadParameter(str(error)) from error

    return parsed


@_usage
def duration(text: str) -> str:
    """A duration such as 30s, checked and returned unchanged."""
    seconds(text)
    return text


@_usage
def size(text: str) -> str:
    """A size such as 10GB, checked and returned unchanged."""
    size_in_bytes(text)
    return text


def time(text: str) -> datetime:
    """An ISO 8601 time (local without a zone), or a duration with a unit, which is subtracted from now."""
    try:
        return datetime.fromisoformat(text).astimezone()
    except ValueError:
        pass
    try:
        if not text.strip().replace(".", "", 1).isdigit():
            return datetime.now(UTC) - timedelta(seconds=seconds(text))
    except CustodyError:
        pass
    raise typer.BadParameter(
        f"{text!r} is not a time. Write 2030-01-31T12:00:00Z, or 15m for a quarter of an hour ago."
    )


def moment(text: str) -> datetime:
    """An ISO 8601 time (local without a zone)."""
    try:
        return datetime.fromisoformat(text).astimezone()
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is not a time. Write 2030-01-31T12:00:00Z.") from error


def start(text: str) -> Start:
    """earliest, latest, an offset, or a time."""
    if text in ("earliest", "latest"):
        return text
    if text.isdigit():
        return int(text)
    try:
        return time(text)
    except typer.BadParameter as error:
        raise typer.BadParameter(f"{text!r} is not earliest, latest, an offset or a time") from error


def _settings(parts: Iterable[str], kind: type[Settings]) -> dict[str, Any]:
    known = {setting.name: setting.kind if setting.kind in (int, float) else str for setting in settings_of(kind)}
    found = {}
    for part in parts:
        name, equals, value = part.partition("=")
        if name not in known or not equals:
            raise typer.BadParameter(f"{kind.what} has no setting {part!r}. {did_you_mean(name, list(known))}")
        try:
            found[name] = known[name](value)
        except ValueError as error:
            raise typer.BadParameter(f"{name} must be a number, not {value!r}") from error
    return found


@_usage
def backoff(text: str) -> Backoff:
    """`exponential:2s:cap=5m:multiplier=3:jitter=0.1`, `linear:1s`, `constant:500ms`."""
    kind, *rest = text.split(":")
    if kind not in BACKOFFS:
        raise typer.BadParameter(f"{kind!r} is not a kind of backoff. {did_you_mean(kind, list(BACKOFFS))}")
    initial: dict[str, Any] = {"initial": rest.pop(0)} if rest and "=" not in rest[0] else {}
    return BACKOFFS[kind](**initial, **_settings(rest, BACKOFFS[kind]))


@_usage
def breaker(text: str) -> Breaker | None:
    """`on`, `off`, or a failure rate with settings: `0.5:min_outcomes=20:window=10s:probe_after=5s`."""
    if text in ("on", "off"):
        return Breaker() if text == "on" else None
    rate, *rest = text.split(":")
    first = [f"failure_rate={rate}"] if "=" not in rate else [rate]
    return Breaker(**_settings([*first, *rest], Breaker))


@_usage
def pattern(text: str) -> str:
    """A pattern of routing keys, checked and returned unchanged."""
    Binding(text)
    return text


def event_state(text: str) -> str:
    """A state of an event in the outbox."""
    if text.upper() not in EventState.__members__:
        raise typer.BadParameter(f"{text!r} is not a state. States are: {', '.join(EventState)}.")
    return text.upper()


def number(text: str) -> int:
    """A whole number."""
    if not text.isdigit():
        raise typer.BadParameter(f"{text!r} is neither a whole number nor none")
    return int(text)


def header(text: str) -> tuple[str, str]:
    """`name=value`."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise typer.BadParameter(f"{text!r} is not name=value")
    return name, value


DURATION: dict[str, Any] = {"parser": duration, "metavar": "DURATION"}
SIZE: dict[str, Any] = {"parser": size, "metavar": "SIZE"}
"""How options that are durations or sizes are parsed and named."""
COMPLETED: dict[str, Any] = {"topic": completion.topics, "group": completion.groups, "dlq_topic": completion.topics}
"""How a shell completes arguments and options, by their name."""
Topic = Annotated[str, typer.Argument(help="The topic.", autocompletion=completion.topics)]
Group = Annotated[str, typer.Argument(help="The group.", autocompletion=completion.groups)]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
Ensure = Annotated[
    bool, typer.Option("--ensure", help="Accept an existing one: change what may be changed, and say what differs.")
]
Partition = Annotated[int | None, typer.Option(help="Only this partition.")]
VisibilityTimeout = Annotated[str | None, typer.Option(help="Duration of a lease.", **DURATION)]
