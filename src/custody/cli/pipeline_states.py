"""`custody pipeline list` and `status`: the state of all pipelines of a database, wherever they run. Needs no Spark."""

from __future__ import annotations

from custody.cli import render
from custody.cli.call import Call
from custody.cli.derived import calls
from custody.cli.session import counted
from custody.engine import Custody
from custody.errors import InvalidArgument
from custody.model.entities import Group
from custody.model.plain import plain
from custody.verbs.pipelines import PipelineState

_SHOWN = 80  # characters of an error in a table


@calls(Custody.pipelines, options=["topic"], without=["group"])
def list_(call: Call[list[PipelineState]]) -> None:
    """List the pipelines with their state (running, retrying, stopped, failed or gone) and last error."""
    call.listing(
        call(),
        [
            ("pipeline", _name),
            "state",
            ("for", lambda one: render.span(one.for_seconds)),
            "tries",
            ("last error", lambda one: _short(one.last_error)),
            "driver",
        ],
        empty="No pipeline has ever run here.",
    )


@calls(Custody.group)
def status(call: Call[Group], topic: str, group: str) -> None:
    """Show the state of one pipeline: tries, last error, driver, claim, and the figures of its group."""
    session = call.session
    standing, found = call(), call.c.pipelines(topic, group)
    if not found:
        raise InvalidArgument(
            f"no pipeline has ever run for group {group!r} of topic {topic!r}", "See `custody pipeline list`."
        )
    state, figures = found[0], call.c.figures(topic, group)
    if session.json:
        paused = {name: getattr(standing, name) for name in ("paused_at", "paused_reason")}
        session.emit({**plain(state), **plain(paused), "figures": figures})
        return
    session.facts(
        {
            "pipeline": _name(state),
            "state": f"{state.state}, for {render.span(state.for_seconds)}",
            **_troubles(state),
            "paused": render.pause(standing),
            "driver": f"{state.driver} (epoch {state.epoch}), alive {render.span(state.seen_seconds)} ago",
            "in flight": _in_flight(state),
            "group": ", ".join(
                f"{name.replace('_', ' ')} {getattr(figures, name):,}"
                for name in ("lag", "waiting", "parked", "dead", "blocked_keys")
            ),
        }
    )


def _troubles(state: PipelineState) -> dict[str, object]:
    facts: dict[str, object] = {}
    if state.tries:
        facts["tries"] = f"{counted(state.tries, 'failure')} in a row"
    if state.last_error is not None and state.error_at is not None:
        facts["last error"] = f"{state.last_error} ({render.moment(state.error_at)})"
    return facts


def _name(state: PipelineState) -> str:
    return f"{state.topic}/{state.group}"


def _in_flight(state: PipelineState) -> str:
    return "nothing" if state.claim is None else f"claim {state.claim}, {counted(state.messages or 0, 'message')}"


def _short(text: str | None) -> str | None:
    return text if text is None or len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"
