"""Parameters of verbs that take several options: a policy, a retention, bindings, headers, a payload."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import typer
from msgspec import UNSET

from custody.cli import arguments
from custody.cli.settings import RETENTION, SettingOptions
from custody.engine.schedules import GivenHeaders, GivenPayload
from custody.model.policy import Policy
from custody.model.retention import Retention
from custody.model.routing import Binding
from custody.wire.fields import Sent
from custody.wire.policies import GivenBindings, GivenPolicy, GivenRetention, GivenSettings
from custody.wire.verb import sent_as

BINDINGS = "Bindings"


@dataclass(frozen=True)
class Composite:
    """`read` makes the value of the options' values; UNSET if none was given."""

    options: Sequence[inspect.Parameter]
    read: Callable[[Mapping[str, Any]], Any]


def of(sent: Sent | None) -> Composite | None:
    """The options of a parameter that is sent like this; None if one option is enough."""
    return None if sent is None else _COMPOSITES.get(sent)


def _option(name: str, kind: Any, *flags: str, **how: Any) -> inspect.Parameter:
    flags = (f"--{name.replace('_', '-')}", *flags)
    default = False if kind is bool else None
    annotation: Any = Annotated[kind if kind is bool else kind | None, typer.Option(*flags, **how)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _policy(given: Mapping[str, Any]) -> Policy:
    """What is not given has the configured defaults."""
    from custody import config

    return replace(config.load().policy, **given)


def _retention(given: Mapping[str, Any]) -> Retention:
    if "time" not in given and "size" not in given:
        raise typer.BadParameter("a retention needs --retention-time or --retention-size")
    return Retention(**given)


def _settings(options: SettingOptions, value: Callable[[Mapping[str, Any]], Any]) -> Composite:
    def read(values: Mapping[str, Any]) -> Any:
        given = options.given(values)
        return value(given) if given else UNSET

    return Composite(options.parameters, read)


def _bindings(values: Mapping[str, Any]) -> Any:
    """One for each pattern, all with the same headers."""
    patterns, headers = values["bind"], dict(values["bind_header"] or ())
    if not patterns:
        return [Binding(headers=headers)] if headers else UNSET
    return [Binding(pattern, headers=headers) for pattern in patterns]


def _headers(values: Mapping[str, Any]) -> Any:
    return dict(values["header"]) if values["header"] else UNSET


def _payload(values: Mapping[str, Any]) -> Any:
    given = values["payload"]
    if given is None or values["text"]:
        return UNSET if given is None else given
    try:
        return json.loads(given)
    except ValueError as error:
        raise typer.BadParameter(f"the payload is not JSON: {error}. For text add --text") from error


_COMPOSITES: dict[Sent | None, Composite] = {
    sent_as(GivenPolicy): _settings(SettingOptions(Policy, panel="The policy"), _policy),
    sent_as(GivenSettings): _settings(SettingOptions(Policy, panel="The policy", without=("ordering",)), dict),
    sent_as(GivenRetention): _settings(SettingOptions(Retention, names=RETENTION, none=False), _retention),
    sent_as(GivenBindings): Composite(
        [
            _option(
                "bind",
                list[Any],
                parser=arguments.pattern,
                metavar="PATTERN",
                help="Receive messages whose routing key matches: orders.*.created, orders.> (* is one segment, "
                "> the rest).",
                rich_help_panel=BINDINGS,
            ),
            _option(
                "bind_header",
                list[Any],
                parser=arguments.header,
                metavar="NAME=VALUE",
                help="Receive only messages with this header; if repeated, with all of them.",
                rich_help_panel=BINDINGS,
            ),
        ],
        _bindings,
    ),
    sent_as(GivenHeaders): Composite(
        [
            _option(
                "header", list[Any], parser=arguments.header, metavar="NAME=VALUE", help="A header; may be repeated."
            )
        ],
        _headers,
    ),
    sent_as(GivenPayload): Composite(
        [
            _option("payload", str, help="The payload: JSON, or text with --text (default: null)."),
            _option("text", bool, help="The payload is text."),
        ],
        _payload,
    ),
}
