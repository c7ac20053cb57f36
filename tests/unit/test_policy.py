"""Policies: durations, the documented defaults, what is refused, and the way to the database's columns and back."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from custody.errors import InvalidArgument, InvalidPolicy
from custody.model.policy import Backoff, Constant, Exponential, Linear, Policy, seconds

DURATIONS = [
    ("100ms", 0.1),
    ("30s", 30),
    ("5m", 300),
    ("1.5h", 5400),
    ("2d", 172800),
    (" 7 s ", 7),
    ("12", 12),
    (0, 0),
    (2, 2),
    (0.25, 0.25),
    (timedelta(minutes=1, milliseconds=5), 60.005),
]


@pytest.mark.req("G7")
@pytest.mark.parametrize(("given_as", "expected"), DURATIONS)
def test_a_duration_is_a_text_with_a_unit_a_number_of_seconds_or_a_timedelta(given_as: Any, expected: float) -> None:
    assert seconds(given_as) == pytest.approx(expected)


@pytest.mark.parametrize(
    "bad",
    [
        *("", "soon", "30 parsecs", "-1s", "1e3", "1s2", "s"),
        *(-1, float("nan"), float("inf"), 1e300, 10**400, timedelta(seconds=-1), True, None, [], "40000d"),
    ],
)
def test_what_is_no_duration_is_refused_with_an_example(bad: Any) -> None:
    with pytest.raises(InvalidArgument, match='"30s"'):
        seconds(bad)


@pytest.mark.req("G8")
def test_the_defaults_are_the_documented_ones() -> None:
    policy = Policy()
    assert policy == Policy(
        ordering="none",
        max_attempts=3,
        backoff=Exponential("100ms", multiplier=2, cap="30s"),
        visibility_timeout="30s",
        handler_timeout="5m",
        on_dead="release",
        dead_letter="keep",
        max_in_flight=None,
        max_ack_holes=10_000,
        max_parked=None,
    )
    assert policy.backoff.jitter == 0


@pytest.mark.req("G8")
def test_an_unknown_key_is_refused_with_a_suggestion() -> None:
    with pytest.raises(InvalidPolicy, match="Did you mean 'max_attempts'"):
        Policy.from_mapping({"max_attemps": 3})
    with pytest.raises(InvalidPolicy, match="Known are: ordering, max_attempts"):
        Policy.from_mapping({"zzz": 3})
    with pytest.raises(InvalidPolicy, match="Did you mean 'multiplier'"):
        Policy.from_mapping({"backoff": {"multiplyer": 3}})
    with pytest.raises(InvalidPolicy, match="'multiplier' is not a setting of the constant backoff"):
        Policy.from_mapping({"backoff": {"kind": "constant", "multiplier": 3}})
    with pytest.raises(InvalidPolicy, match="Did you mean 'exponential'"):
        Policy.from_mapping({"backoff": {"kind": "exponentiel"}})


@pytest.mark.parametrize(
    "bad",
    [
        {"ordering": "keys"},
        {"on_dead": "drop"},
        {"on_dead": "hold"},
        {"dead_letter": "nowhere"},
        {"max_attempts": 0},
        {"max_attempts": None},
        {"max_attempts": "3"},
        {"max_attempts": True},
        {"max_in_flight": 0},
        {"max_ack_holes": 1.5},
        {"max_parked": -1},
        {"visibility_timeout": 0},
        {"visibility_timeout": None},
        {"visibility_timeout": "long"},
        {"handler_timeout": "0s"},
        {"retry_for": 0},
        {"backoff": "1s"},
        {"backoff": None},
        {"backoff": {"initial": "x"}},
        {"backoff": {"cap": -1}},
        {"backoff": {"jitter": 1.5}},
        {"backoff": {"jitter": "some"}},
        {"backoff": {"multiplier": 0.5}},
        {"backoff": {"multiplier": None}},
        {"backoff": {"kind": []}},
        {"max_attempts": 2**31},
        {"max_parked": 2**63},
        {"breaker": 5},
        {"breaker": {"min_outcomes": 1.5}},
        {"tenant_separator": 5},
        {"tenant_separator": ["a"]},
    ],
)
def test_what_makes_no_sense_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        Policy.from_mapping(bad)


@pytest.mark.req("V4")
def test_a_backoff_comes_from_a_mapping_with_its_kind() -> None:
    assert Policy.from_mapping({"backoff": {"initial": "1s"}}).backoff == Exponential("1s")
    assert Policy.from_mapping({"backoff": {"kind": "linear", "initial": 2}}).backoff == Linear(2)
    assert Policy.from_mapping({"backoff": {"kind": "constant", "cap": "1h"}}).backoff == Constant(cap="1h")


@pytest.mark.req("V4")
def test_a_constant_backoff_is_not_cut_by_a_cap_that_nobody_set() -> None:
    assert Constant("5m").columns()["backoff_cap"] == "300.0 s"


durations = st.timedeltas(timedelta(milliseconds=1), timedelta(days=400))
jitters = st.floats(0, 1)
backoffs: st.SearchStrategy[Backoff] = st.one_of(
    st.builds(Exponential, durations, cap=durations, jitter=jitters, multiplier=st.floats(1, 1000)),
    st.builds(Linear, durations, cap=durations, jitter=jitters),
    st.builds(Constant, durations, cap=durations, jitter=jitters),
)
caps = st.none() | st.integers(1, 2**40)
policies = st.builds(
    Policy,
    ordering=st.just("key"),
    max_attempts=st.integers(1, 2**31 - 1),
    retry_for=st.none() | durations,
    backoff=backoffs,
    visibility_timeout=durations,
    handler_timeout=st.none() | durations,
    on_dead=st.sampled_from(["release", "hold"]),
    max_in_flight=caps,
    max_ack_holes=caps,
    max_parked=caps,
)


def as_read(columns: dict[str, Any]) -> dict[str, Any]:
    """The columns as the driver returns them: intervals as timedeltas."""
    return {
        name: timedelta(seconds=float(value[:-2])) if isinstance(value, str) and value.endswith(" s") else value
        for name, value in columns.items()
    }


@given(policies)
def test_a_policy_survives_the_way_to_its_columns_and_back(policy: Policy) -> None:
    read = Policy.from_columns(as_read(policy.columns()))
    assert read.columns() == policy.columns()
    assert type(read.backoff) is type(policy.backoff)


@given(policies)
def test_a_policy_survives_the_way_to_a_mapping_and_back(policy: Policy) -> None:
    plain: dict[str, Any] = {name: getattr(policy, name) for name in policy.__dataclass_fields__}
    plain["backoff"] = {"kind": policy.backoff.kind} | {
        name: getattr(policy.backoff, name) for name in policy.backoff.__dataclass_fields__
    }
    assert Policy.from_mapping(plain) == policy


@pytest.mark.req("N10")
def test_fairness_needs_the_order_of_keys() -> None:
    with pytest.raises(InvalidPolicy, match='Set ordering="key" too'):
        Policy(fairness="key")
    fair = Policy.from_mapping({"ordering": "key", "fairness": "tenant", "tenant_separator": "/"})
    assert (fair.fairness, fair.tenant_separator) == ("tenant", "/")
    with pytest.raises(InvalidPolicy, match="fairness cannot be"):
        Policy.from_mapping({"ordering": "key", "fairness": "all"})
    with pytest.raises(InvalidPolicy, match="tenant_separator"):
        Policy(ordering="key", tenant_separator="")
