"""Checks the arguments of a pipeline when it is defined, before Spark is started."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from os import PathLike

from custody.errors import InvalidArgument, InvalidPolicy, PipelineRefused, did_you_mean
from custody.model.policy import Policy
from custody.model.routing import Binding, bindings_of
from custody.model.start import Start, require_start
from custody.spark.outside.sinks import Outside

_START = ["earliest", "latest"]


def refuse_unknown(given: Mapping[str, object], known: Iterable[str], what: str) -> None:
    """Refuses an unknown keyword argument."""
    for name in given:
        raise InvalidArgument(f"{what} has no argument {name!r}", did_you_mean(name, [*known]))


def name_of(value: object, what: str) -> str:
    """The name of a topic or a group."""
    if isinstance(value, list | tuple | set | frozenset):
        raise InvalidArgument(
            f"{what} must be one name, not a {type(value).__name__}",
            "A pipeline reads one topic with one group: define a pipeline for each.",
        )
    if not isinstance(value, str) or not value:
        raise InvalidArgument(f"{what} must be a name, not {value!r}", f"For example {what}='orders'.")
    return value


def sinks_of(given: object) -> tuple[tuple[str, ...], tuple[Outside, ...]]:
    """The topics, and the sinks outside of the database."""
    if given is None:
        return (), ()
    several = given if isinstance(given, list | tuple) else [given]
    for number, one in enumerate(several):
        _require_sink(one, "sink" if several is not given else f"sink[{number}]")
    topics = tuple(one for one in several if isinstance(one, str))
    twice = [one for number, one in enumerate(topics) if one in topics[:number]]
    if twice:
        raise InvalidArgument(f"the sink has the topic {twice[0]!r} twice", "Name it once.")
    outside = tuple(one for one in several if isinstance(one, Outside))
    for one in outside:
        schema_of(one.schema, f"schema of the {one.name}")
    return topics, outside


def _require_sink(one: object, where: str) -> None:
    if isinstance(one, Outside) or (isinstance(one, str) and one):
        return
    if isinstance(one, PathLike):
        raise InvalidArgument(f"{where} is a path", f"For files: Files({str(one)!r}).")
    if isinstance(one, type) and issubclass(one, Outside):
        raise InvalidArgument(f"{where} is the class {one.__name__}", f"Give an instance: {one.__name__}(…).")
    if callable(one):
        raise InvalidArgument(f"{where} is a function", "Decorate it with @pipeline.write instead.")
    raise InvalidArgument(
        f"{where} cannot be {one!r}", "A sink is the name of a topic, Files(…), Jdbc(…), …, or a list of those."
    )


def policy_of(given: object) -> Policy | None:
    if given is None or isinstance(given, Policy):
        return given
    example = ", ".join(f"{name}=…" for name in given) if isinstance(given, dict) else "ordering='key'"
    raise InvalidPolicy(
        f"the policy must be a Policy, not a {type(given).__name__}", f"Write custody.Policy({example})."
    )


def require_order(policy: Policy | None, pipeline: str) -> None:
    """Refuses a keyed pipeline without order by key. Without a policy, the group has one already."""
    if policy is not None and policy.ordering != "key":
        raise PipelineRefused(
            f"pipeline {pipeline} is keyed, and its policy has no order by key: the state of a key depends on the "
            "order of its messages",
            'Give it policy=custody.Policy(ordering="key").',
        )


def schema_of(given: object, what: str = "schema") -> str | None:
    if given is None or (isinstance(given, str) and given.strip()):
        return given
    raise InvalidArgument(
        f"the {what} must be a string, not {repr(given) if isinstance(given, str | None) else type(given).__name__}",
        "Write the fields as in SQL: 'sku string, add int'.",
    )


def start_of(given: Start) -> Start:
    """The start position of a new group."""
    if isinstance(given, str) and given not in _START:
        raise InvalidArgument(f"start cannot be {given!r}", did_you_mean(given, _START))
    require_start(given)
    return given


def bound_to(given: object) -> tuple[Binding, ...] | None:
    if given is None:
        return None
    if not isinstance(given, Iterable) and not isinstance(given, Binding):
        raise InvalidArgument(f"bindings cannot be {given!r}", "Give a list of patterns: ['orders.eu.>'].")
    return bindings_of((given,) if isinstance(given, Binding) else given)
