"""Options derived from settings: those of a group's policy, of a topic's retention and of a server."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from custody.cli import arguments
from custody.model.policy import Backoff, Breaker, Duration
from custody.model.retention import Size
from custody.model.setting import Setting, Settings, settings_of

NONE = "none"
"""What a user writes to remove a limit or a timeout."""
RETENTION = {"time": "retention_time", "size": "retention_size"}
"""Options that say what they are about, which their settings need not."""
Command = Callable[..., None]


class SettingOptions:
    """The options of settings. `names` renames them; with `none`, the value `none` removes an optional setting.

    With `defaults`, an option that is not given has the default of its setting.
    """

    def __init__(
        self,
        kind: type[Settings],
        *,
        panel: str | None = None,
        without: tuple[str, ...] = (),
        names: Mapping[str, str] | None = None,
        none: bool = True,
        defaults: bool = False,
    ) -> None:
        self._defaults = defaults
        self._found = {(names or {}).get(one.name, one.name): one for one in settings_of(kind)}
        self._found = {name: one for name, one in self._found.items() if one.name not in without}
        self.parameters = [
            _parameter(name, one, panel, none=none, defaults=defaults) for name, one in self._found.items()
        ]

    def given(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The settings that are given by the values of all options."""
        given = {}
        for name, setting in self._found.items():
            value = values[name]
            if value is not None and (self._defaults or value is not False):
                given[setting.name] = None if setting.optional and value == NONE else value
        return given

    def __call__(self, command: Command) -> Command:
        """Adds the options to a command, which receives the given ones as the dict `given`."""
        names = {one.name for one in self.parameters}

        @functools.wraps(command)
        def run(**values: Any) -> None:
            others = {name: value for name, value in values.items() if name not in names}
            command(**others, given=self.given(values))

        signature = inspect.signature(command, eval_str=True)
        kept = [one for one in signature.parameters.values() if one.name != "given"]
        run.__signature__ = signature.replace(parameters=[*kept, *self.parameters])  # type: ignore[attr-defined]  # for typer
        return run


def _parameter(name: str, setting: Setting, panel: str | None, *, none: bool, defaults: bool) -> inspect.Parameter:
    kind, how = _shape(setting, none=none and setting.optional)
    text = f"{setting.help} {_EXAMPLES.get(setting.kind, '')}".strip()
    option = typer.Option(_flag(name, setting), help=text, rich_help_panel=panel, **how)
    annotation = Annotated[kind, option]  # type: ignore[valid-type]  # a variable
    default = setting.default if defaults else False if setting.kind is bool else None
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _flag(name: str, setting: Setting) -> str:
    written = name.replace("_", "-")
    return f"--{written}/--no-{written}" if setting.default is True else f"--{written}"


def usage(setting: Setting, name: str, *, none: bool) -> str:
    """The option with its metavar, as in the docs."""
    _, how = _shape(setting, none=none and setting.optional)
    choices = (*((NONE,) if none and setting.optional else ()), *setting.choices)
    written = how.get("metavar") or ("|".join(choices) if setting.choices else "" if setting.kind is bool else "N")
    return f"--{name.replace('_', '-')} {written}".strip()


def _shape(setting: Setting, *, none: bool) -> tuple[Any, dict[str, Any]]:
    """The type of the option, and typer's arguments for it (parser, metavar)."""
    if setting.choices:
        choices = (NONE, *setting.choices) if none else setting.choices
        return Literal[choices] | None, {}
    if setting.kind is bool:
        return bool, {}
    if setting.kind is int and not setting.optional:
        return int | None, {"min": setting.meta.ge}
    parse, metavar = _PARSED[setting.kind]
    if none and setting.nested is None:
        parse, metavar = _or_none(parse), f"{metavar}|{NONE}"
    return Any, {"parser": parse, "metavar": metavar}


def _or_none(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    return lambda text: text if text == NONE else parse(text)


_PARSED: dict[Any, tuple[Callable[[str], Any], str]] = {
    int: (arguments.number, "N"),
    str: (str, "TEXT"),
    Path: (Path, "FILE"),
    Duration: (arguments.duration, "DURATION"),
    Size: (arguments.size, "SIZE"),
    Backoff: (arguments.backoff, "KIND[:INITIAL[:NAME=VALUE…]]"),
    Breaker: (lambda text: arguments.breaker(text) or NONE, "on|off|RATE[:NAME=VALUE…]"),
}
_EXAMPLES: dict[Any, str] = {
    Backoff: "For example exponential:2s:cap=5m:multiplier=2:jitter=0.1, linear:1s or constant:500ms.",
    Breaker: "0.5:min_outcomes=20:window=10s:probe_after=5s opens at a failure rate of 50 %.",
}
