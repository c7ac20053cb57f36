"""States of keys in a task, without Spark and a database: what a handler sees, what counts, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

import custody
from custody.errors import InvalidArgument, InvalidPayload, PipelineRefused
from custody.model.entities import Message
from custody.spark import KeyState, Pipeline
from custody.spark.database.states import Found
from custody.spark.keyed import dedup, session, window
from custody.spark.tasks.state_type import MOST, state_of
from custody.spark.tasks.states import FOREIGN, NO_KEY, States
from custody.verbs.pipelines import StagedStates

pytestmark = pytest.mark.req("X8")

KEYED = custody.Policy(ordering="key")


@dataclass
class Total:
    pieces: int = 0
    seen: list[int] = field(default_factory=list)


class Point(msgspec.Struct):
    x: float


@dataclass
class Kept:
    """In place of the database: what it has, and what was staged."""

    states: dict[str, bytes] = field(default_factory=dict)
    own: bool = True
    staged: list[tuple[int, str, bytes | None]] = field(default_factory=list)
    reads: list[list[str]] = field(default_factory=list)

    def read(self, partition: int, keys: Sequence[str]) -> dict[str, Found]:
        self.reads.append([*keys])
        return {key: Found(self.own, self.states.get(key)) for key in keys}

    def add(self, partition: int, offset: int, key: str, state: bytes | None) -> None:
        self.staged.append((offset, key, state))

    def write(self) -> StagedStates | None:
        return None


def message(offset: int, payload: Any = None, key: str | None = "a", at: float | None = None) -> Message:
    return Message(
        topic="in",
        partition=0,
        offset=offset,
        key=key,
        payload=payload,
        headers={"h": "1", "x-custody-attempt": "2"},
        attempt=1,
        published_at=datetime.fromtimestamp(offset if at is None else at, UTC),
        priority=None,
        topic_uid=None,
    )


def task(
    kind: Any, handler: Callable[..., object], kept: Kept | None = None
) -> tuple[Callable[[Message], object], Kept]:
    """Runs a message as a task does."""
    kept = kept or Kept()
    states = States(state_of(kind, None), kept, handler)

    def run(one: Message) -> object:
        states.load(one.partition, [one.key])
        returned = states.handle(one)
        found = list(returned) if hasattr(returned, "__next__") else returned  # type: ignore[call-overload]
        states.done(one)
        return found

    return run, kept


def test_the_next_message_of_a_key_sees_the_state_of_the_one_before() -> None:
    def handle(one: Message, state: KeyState[Total]) -> object:
        total = state.get() or Total()
        state.update(Total(total.pieces + one.payload, [*total.seen, one.offset]))
        return state.exists()

    run, kept = task(Total, handle, Kept({"b": b'{"pieces":40}'}))
    for number in range(3):
        run(message(number, 1))
    run(message(3, 2, key="b"))
    assert kept.staged == [
        (0, "a", b'{"pieces":1,"seen":[0]}'),
        (1, "a", b'{"pieces":2,"seen":[0,1]}'),
        (2, "a", b'{"pieces":3,"seen":[0,1,2]}'),
        (3, "b", b'{"pieces":42,"seen":[3]}'),
    ]
    assert kept.reads == [["a"], ["b"]], "each key is read once"


def test_a_message_that_fails_leaves_the_state_as_it_was() -> None:
    def handle(one: Message, state: KeyState[Total]) -> None:
        total = state.get() or Total()
        total.seen.append(one.offset)  # in place, too
        state.update(total)
        if one.payload == "fail":
            raise ValueError("no")

    run, kept = task(Total, handle)
    run(message(0))
    with pytest.raises(ValueError, match="no"):
        run(message(1, "fail"))
    run(message(2))
    assert kept.staged[-1] == (2, "a", b'{"pieces":0,"seen":[0,2]}')
    assert [offset for offset, *_ in kept.staged] == [0, 2]


def test_what_is_changed_in_place_counts_only_after_an_update() -> None:
    def handle(one: Message, state: KeyState[Total]) -> int:
        total = state.get()
        assert total is not None
        total.pieces += 1
        return total.pieces

    run, kept = task(Total, handle, Kept({"a": b'{"pieces":1}'}))
    assert [run(message(0)), run(message(1))] == [2, 2]
    assert kept.staged == []


def test_a_state_can_be_cleared_and_made_anew() -> None:
    def handle(one: Message, state: KeyState[Point]) -> bool:
        state.clear() if one.payload == "clear" else state.update(Point(1.5))
        return state.exists()

    run, kept = task(Point, handle, Kept({"a": b'{"x":1}'}))
    assert [run(message(0, "clear")), run(message(1)), run(message(2, "clear"))] == [False, True, False]
    assert kept.staged == [(0, "a", None), (1, "a", b'{"x":1.5}'), (2, "a", None)]


def test_a_generator_may_update_before_and_after_it_yields() -> None:
    def handle(one: Message, state: KeyState[int]) -> Any:
        state.update(1)
        yield state.get()
        state.update(2)

    run, kept = task(int, handle)
    assert run(message(0)) == [1]
    assert kept.staged == [(0, "a", b"2")]


def test_a_message_without_a_key_or_in_a_foreign_partition_is_dead() -> None:
    run, _ = task(int, lambda _one, _state: None)
    with pytest.raises(custody.Dead, match=NO_KEY):
        run(message(0, key=None))
    run, _ = task(int, lambda _one, _state: None, Kept(own=False))
    with pytest.raises(custody.Dead, match=FOREIGN):
        run(message(0))


@pytest.mark.parametrize(
    ("kind", "value", "told"),
    [
        (Total, {"pieces": 1}, "does not fit Total: it is of type dict"),
        (Total, Total(pieces="many"), "does not fit Total: Expected `int`, got `str`"),
        (Point, Point(float("nan")), "does not fit Point: Expected `float`, got `null`"),
        (dict[str, int], {"a": "b"}, "Expected `int`, got `str`"),
        (str, "x" * MOST, f"would have 262,146 bytes; a state has at most {MOST:,}"),
        (object, object(), "does not fit object"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_before_it_is_stored(kind: Any, value: Any, told: str) -> None:
    run, kept = task(kind, lambda _one, state: state.update(value))
    with pytest.raises(InvalidPayload, match=told):
        run(message(0))
    assert kept.staged == []


def test_a_stored_state_that_no_longer_fits_is_named() -> None:
    run, _ = task(Point, lambda _one, state: state.get(), Kept({"a": b'{"y":1}'}))
    with pytest.raises(InvalidPayload, match=r"state of key 'a' does not fit Point: .*`x`"):
        run(message(0))


def test_a_schema_as_in_sql_gives_dicts() -> None:
    fields = [{"name": "n", "type": "integer"}, {"name": "who", "type": "string"}]
    kind = state_of("n int, who string", None).parsed({"type": "struct", "fields": fields})
    state: KeyState[dict[str, Any]] = KeyState("a", kind.codec(), b'{"n":1}')
    assert state.get() == {"n": 1, "who": None}
    state.update({"n": 2, "who": "me"})
    assert state.json == b'{"n":2,"who":"me"}'
    for wrong, told in (({"nn": 1}, "Did you mean 'n'"), ({"n": "1"}, "Expected `int"), ([1], "not a dict")):
        with pytest.raises(InvalidPayload, match=told):
            state.update(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, "the state cannot be None"),
        ({"state": " "}, "the state cannot be ' '"),
        ({"state": Total, "ttl": "soon"}, "'soon' is not a duration"),
        ({"state": Total, "ttl": 0}, "a ttl is more than zero"),
        ({"state": 7}, "the state cannot be decoded as 7"),
    ],
)
def test_wrong_arguments_are_refused_at_the_definition(given: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidArgument, match=told):
        Pipeline(source="in", group="g", policy=KEYED).keyed(**given)


def test_a_struct_that_cannot_be_sent_to_executors_is_refused() -> None:
    class Local(msgspec.Struct):
        count: int = 0

    with pytest.raises(InvalidArgument, match="the Struct Local is defined in a script or a function"):
        Pipeline(source="in", group="g", policy=KEYED).keyed(state=Local)


def test_a_dataclass_of_a_script_can_be_sent_after_it_was_decoded() -> None:
    @dataclass
    class Inner:
        n: int = 0

    @dataclass
    class Outer:
        inner: list[Inner] = field(default_factory=list)

    Outer.__annotations__["inner"] = list[Inner]  # as it is without the import from __future__
    pipeline = Pipeline(source="in", group="g", policy=KEYED)
    pipeline.keyed(state=Outer)(lambda _message, state: state.update(Outer([Inner(1)])))
    assert pipeline.state is not None
    codec = pipeline.state.codec()
    assert codec.decode("a", codec.encode("a", Outer([Inner(1)]))) == Outer([Inner(1)])
    pipeline.require_complete()


def test_a_wrong_handler_is_refused_at_the_definition() -> None:
    pipeline = Pipeline(source="in", group="g", policy=KEYED)
    with pytest.raises(InvalidArgument, match=r"def handler\(message, state\)"):
        pipeline.keyed(state=int)(lambda _message: None)
    with pytest.raises(InvalidArgument, match=r"@pipeline\.keyed\(state=…\)"):
        pipeline.keyed(lambda _message, _state: None)  # type: ignore[type-var]

    async def waits(message: Message, state: KeyState[int]) -> None: ...

    with pytest.raises(InvalidArgument, match="async def"):
        pipeline.keyed(state=int)(waits)
    pipeline.keyed(dedup(by="id", within="1d"))
    with pytest.raises(InvalidArgument, match="already has"):
        pipeline.each(lambda _message: None)


def test_a_policy_without_order_by_key_is_refused_by_name() -> None:
    pipeline = Pipeline(source="in", group="g", policy=custody.Policy())
    pipeline.keyed(state=int)(lambda _message, _state: None)
    with pytest.raises(PipelineRefused, match="in/g is keyed, and its policy has no order by key"):
        pipeline.require_complete()


def test_duplicates_within_the_time_are_skipped() -> None:
    run, kept = task(dict[str, float], dedup(by="id", within="10s"))
    passed = run(message(0, {"id": 7, "n": 1}))
    assert passed == custody.Outgoing({"id": 7, "n": 1}, headers={"h": "1"}), "Custody's own headers are not passed on"
    with pytest.raises(custody.Skip, match="a duplicate of '7'"):
        run(message(9, {"id": 7, "n": 2}))
    assert run(message(9, {"id": 8, "n": 3})) is not None
    assert run(message(10, {"id": 7, "n": 4})) is not None, "ten seconds later it is none"
    assert kept.staged[-1] == (10, "a", b'{"8":9.0,"7":10.0}'), "what is too old is forgotten"
    with pytest.raises(custody.Dead, match="no field 'id'"):
        run(message(11, {"n": 1}))
    then, _ = task(dict[str, float], dedup(by=lambda one: one.offset, within="1d", then=lambda one: one.payload))
    assert then(message(1, "x")) == "x"


def test_a_window_comes_out_when_a_later_message_of_its_key_closes_it() -> None:
    handler = window(every="1m", on="at", aggregate={"n": "count", "sum": "sum(v)", "all": "list(v)", "avg": "avg(v)"})
    run, _ = task(dict[str, Any], handler)
    assert run(message(0, {"at": 0, "v": 1})) == []
    assert run(message(1, {"at": 59.5, "v": 2})) == []
    (first,) = run(message(2, {"at": 60, "v": 3}))  # type: ignore[misc]
    assert first == {
        "start": "1970-01-01T00:00:00+00:00",
        "end": "1970-01-01T00:01:00+00:00",
        "n": 2,
        "sum": 3,
        "all": [1, 2],
        "avg": 1.5,
    }
    with pytest.raises(custody.Skip, match="late: its window ended at 1970-01-01T00:01"):
        run(message(3, {"at": "1970-01-01T00:00:10Z", "v": 4}))
    assert run(message(4, {"at": 0, "v": 4}, key="b")) == [], "another key has its own time"


def test_late_messages_count_while_their_window_is_open() -> None:
    run, _ = task(dict[str, Any], window(every="1m", on="at", late="30s", aggregate={"n": "count", "least": "min(v)"}))
    found = [run(message(n, {"at": at, "v": at})) for n, at in enumerate([50, 70, 10, 89, 200])]
    shown = [[(one["start"][-14:-6], one["n"], one["least"]) for one in some] for some in found]  # type: ignore[attr-defined]
    assert shown == [[], [], [], [], [("00:00:00", 2, 10), ("00:01:00", 2, 70)]]


def test_a_session_ends_with_a_gap_and_a_message_between_two_joins_them() -> None:
    run, _ = task(dict[str, Any], session(gap="30s", on="at", late="1m", aggregate={"n": "count", "max": "max(v)"}))
    found = [run(message(n, {"at": at, "v": n})) for n, at in enumerate([0, 50, 25, 79, 1000])]
    assert found[:-1] == [[], [], [], []]
    assert found[-1] == [{"start": "1970-01-01T00:00:00+00:00", "end": "1970-01-01T00:01:19+00:00", "n": 4, "max": 3}]
    with pytest.raises(custody.Skip, match="late: sessions up to"):
        run(message(5, {"at": 900, "v": 1}))


@pytest.mark.parametrize("wrong", ["yesterday", "2026-01-01T00:00:00", True, {"at": 1}])
def test_a_time_that_is_none_makes_its_message_dead(wrong: Any) -> None:
    run, _ = task(dict[str, Any], window(every="1m", on="at", aggregate={"n": "count"}))
    with pytest.raises(custody.Dead, match=r"is no time|has no zone"):
        run(message(0, {"at": wrong}))


def test_what_cannot_be_added_makes_its_message_dead() -> None:
    run, _ = task(dict[str, Any], window(every="1m", aggregate={"sum": "sum(v)", "n": "count(v)"}))
    with pytest.raises(custody.Dead, match="the field 'v' is 'x', and sum needs a number"):
        run(message(0, {"v": "x"}))
    run(message(1, {}))
    ((first),) = run(message(60, {"v": 1}))  # type: ignore[misc]
    assert (first["sum"], first["n"]) == (None, 0)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, "at least one aggregate"),
        ({"a": "sum"}, "sum needs a field"),
        ({"a": "total(v)"}, "no aggregate 'total'"),
        ({"a": "sum(v"}, "is no aggregate"),
        ({"start": "count"}, "cannot be named 'start'"),
    ],
)
def test_wrong_aggregates_are_refused_at_the_definition(given: dict[str, str], told: str) -> None:
    with pytest.raises(InvalidArgument, match=told):
        window(every="1m", aggregate=given)


def test_lengths_are_longer_than_zero() -> None:
    for make in (
        lambda: dedup(by="id", within=0),
        lambda: window(every=0, aggregate={"n": "count"}),
        lambda: session(gap=0, aggregate={"n": "count"}),
    ):
        with pytest.raises(InvalidArgument, match="must be longer than zero"):
            make()


def test_a_keyed_handler_is_tested_without_spark() -> None:
    pipeline = Pipeline(source="in", group="g", sink="out", policy=KEYED)

    @pipeline.keyed(state="total bigint")
    def add(message: Message, state: KeyState[dict[str, int]]) -> object:
        total = (state.get() or {"total": 0})["total"] + message.payload
        state.update({"total": total})
        if message.payload == 13:
            raise ValueError("no")
        return {"total": total}

    tested = pipeline.test([1, 2, 13, 4], key="a", states={"a": {"total": 40}, "b": {"total": 1}})
    assert tested.outcomes == ["ack", "ack", "nack", "release"]
    assert [one.payload["total"] for one in tested.outputs] == [41, 43]
    assert tested.states == {"a": {"total": 43}, "b": {"total": 1}}
    each = Pipeline(source="in", group="g")
    each.each(lambda _message: None)
    with pytest.raises(InvalidArgument, match="keeps no states"):
        each.test([1], states={"a": 1})
