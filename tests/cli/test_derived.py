"""Commands that are made of verbs: a parameter of a verb is an argument or an option without being written again."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Literal, TypedDict, Unpack

import pytest
import typer
from msgspec import UNSET, UnsetType
from typer.testing import CliRunner

from custody import Policy
from custody.cli.app import registered
from custody.cli.call import Call
from custody.cli.derived import calls
from custody.cli.session import Session
from custody.wire.fields import DryRun, GivenTimeout, Help, Offset, Page, Partition, Positive
from custody.wire.policies import GivenPolicy


class Filter(TypedDict, total=False):
    """As a verb has them."""

    offsets: Annotated[Sequence[Offset] | None, Help("Only these.")]
    since: Annotated[datetime | None, Help("Only later ones.")]
    limit: Annotated[Positive | None, Help("At most this many.")]


class Facade:
    """Notes the arguments of its verbs."""

    def act(
        self,
        topic: str,
        partition: Partition,
        *,
        mode: Literal["fast", "slow"] = "fast",
        most: Page = 7,
        age: GivenTimeout | UnsetType | None = UNSET,
        policy: GivenPolicy | None = None,
        dry_run: DryRun = False,
        **which: Unpack[Filter],
    ) -> dict[str, Any]:
        """Does it.

        And returns it.
        """
        given = {"topic": topic, "partition": partition, "mode": mode, "most": most, "age": age, "policy": policy}
        return {**given, "dry_run": dry_run, **which}


def made(show: Callable[..., None], **how: Any) -> typer.Typer:
    @contextmanager
    def opened(_: Session) -> Any:
        yield Facade()

    app = typer.Typer()
    app.command()(calls(Facade.act, on=opened, **how)(show))
    return app


SESSION = Session(database=None, home=None, listen_url=None, json=False, quiet=False, color=False)


def ran(show: Callable[..., None], *arguments: str, code: int = 0, **how: Any) -> str:
    answer = CliRunner().invoke(made(show, **how), arguments, obj=SESSION, env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert answer.exit_code == code, answer.output
    return answer.output


def test_arguments_and_options_are_the_parameters_of_the_verb() -> None:
    found: dict[str, Any] = {}

    def show(call: Call[dict[str, Any]]) -> None:
        found.update(call())

    ran(show, "orders", "3")
    assert found == Facade().act("orders", 3), "what is not given has the default of the verb"
    given = ("--mode", "slow", "--most", "9", "--age", "2m", "--max-attempts", "4", "--dry-run")
    ran(show, "orders", "3", *given, "--offset", "1", "--offset", "2", "--since", "15m", "--limit", "5")
    assert (found["mode"], found["most"], found["age"], found["dry_run"]) == ("slow", 9, "2m", True)
    assert (found["offsets"], found["limit"]) == ([1, 2], 5)
    assert abs(found["since"] + timedelta(minutes=15) - datetime.now(UTC)) < timedelta(minutes=1)
    assert isinstance(found["policy"], Policy)
    assert found["policy"].max_attempts == 4


@pytest.mark.parametrize(
    "wrong",
    [("-1",), ("x",), ("3", "--mode", "medium"), ("3", "--limit", "0"), ("3", "--age", "soon"), ("3", "--most", "0")],
)
def test_bounds_are_those_of_the_verb(wrong: tuple[str, ...]) -> None:
    def show(call: Call[dict[str, Any]]) -> None:
        raise AssertionError(call())

    ran(show, "--", "orders", *wrong, code=2) if wrong == ("-1",) else ran(show, "orders", *wrong, code=2)


def test_help_and_defaults_stand_at_the_verb() -> None:
    def show(call: Call[dict[str, Any]]) -> None:
        call()

    text = ran(show, "--help", names={"topic": "where"}, without=["policy"])
    for said in ("Does it.", "where", "Only these. May be repeated.", "(default: 7)", "(default: fast)", "--dry-run"):
        assert said in text
    assert "returns" not in text
    assert "--max-attempts" not in text


def test_a_command_has_options_of_its_own_and_gets_the_parameters_that_it_names() -> None:
    seen: list[object] = []

    def show(
        call: Call[dict[str, Any]], topic: str, most: int, loud: Annotated[bool, typer.Option("--loud")] = False
    ) -> None:
        """Shows it."""
        seen.extend((topic, most, loud, sorted(call.given)))

    ran(show, "orders", "3", "--loud")
    assert seen == ["orders", 7, True, ["partition", "topic"]]
    assert "Shows it." in ran(show, "--help")


def test_a_dry_run_comes_before_the_question() -> None:
    def show(call: Call[dict[str, Any]]) -> None:
        call.confirmed(lambda found: f"Dry {found['dry_run']}?")

    assert "Dry True? This needs a confirmation" in ran(show, "o", "0", code=2, confirms=True)
    ran(show, "o", "0", "--yes", confirms=True)
    ran(show, "o", "0", "--dry-run", confirms=True)


def test_a_parameter_that_cannot_be_an_option_is_refused_when_the_command_is_made() -> None:
    def wrong(self: object, *, what: object) -> None:
        """Takes anything."""

    with pytest.raises(TypeError, match="no option can be made"):
        calls(wrong)


def test_every_parameter_of_a_derived_command_has_a_help() -> None:
    def commands(app: typer.Typer) -> list[Callable[..., Any]]:
        own = [one.callback for one in app.registered_commands if one.callback is not None]
        return own + [found for group in app.registered_groups for found in commands(group.typer_instance)]

    derived = [one for one in commands(registered()) if hasattr(one, "__verb__")]
    assert len(derived) > 40
    for command in derived:
        assert command.__doc__, command.__name__
        for parameter in list(inspect.signature(command).parameters.values())[1:]:
            (option,) = parameter.annotation.__metadata__
            assert option.help, f"{parameter.name} of {command.__verb__.__qualname__}"
