"""A verb is declared once: what the server and the client make of each declaration."""

from __future__ import annotations

import inspect
import re
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, TypedDict, Unpack, get_type_hints

import msgspec
import pytest

import custody
from custody import Custody
from custody.errors import GroupNotFound, InvalidArgument, OffsetOutOfRange, PartitionNotFound, TopicNotFound
from custody.http.app import OPERATIONS
from custody.http.rights import Caller
from custody.model.bounds import Bounded
from custody.model.entities import Rewound
from custody.model.limits import LARGEST
from custody.remote import RemoteCustody
from custody.remote.derived import method_of
from custody.remote.producers import RemoteTransactions
from custody.store.functions import parameters_of
from custody.verbs.transactions import Transactions
from custody.wire.answers import CountOut, InFlightOut, RedrivenOut, RewindOut
from custody.wire.fields import LISTED, Help, Name, Offset, Page, Partition, Reason
from custody.wire.verb import Verb, declared, verb

pytestmark = pytest.mark.core

VERBS = declared(Custody)
BY_OPERATION = {operation.name: operation for operation in OPERATIONS}
ALL = {verb.operation: verb for verb in (*VERBS.values(), *declared(Transactions).values())}


@pytest.fixture(params=ALL.values(), ids=ALL.keys())
def one(request: pytest.FixtureRequest) -> Verb:
    found: Verb = request.param
    return found


def test_a_verb_says_what_it_does_and_who_may(one: Verb) -> None:
    assert one.function.__doc__, "the docstring describes it over HTTP too"
    assert one.right in ("any", *Caller.__dataclass_fields__)
    assert set(one.in_path) <= set(one.hints), "each placeholder of the path is a parameter"


def test_a_verb_is_an_operation_with_its_names(one: Verb) -> None:
    operation = BY_OPERATION[one.operation]
    assert (operation.method, operation.path, operation.answer) == (one.method, one.path, one.answer)
    assert " ".join((one.function.__doc__ or "").split()).startswith(operation.summary)
    if operation.body is None:
        assert operation.example is None
    else:
        operation.decode(msgspec.json.encode(operation.example))
    sent = {*one.in_path.values(), *operation.query.__struct_encode_fields__}
    sent |= set() if operation.body is None else set(operation.body.__struct_encode_fields__)
    assert sent == {one.names.get(name, name) for name in one.hints}


def test_an_operation_has_one_name() -> None:
    assert len(BY_OPERATION) == len(OPERATIONS)


def test_a_client_has_it_with_the_same_signature(one: Verb) -> None:
    client, facade = (RemoteCustody, Custody) if VERBS.get(one.name) is one else (RemoteTransactions, Transactions)
    mine, its = getattr(client, one.name), getattr(facade, one.name)
    assert mine is not its, "the one of the façade would need a database"
    assert [str(one).partition(":")[0] for one in inspect.signature(mine).parameters.values()] == [
        str(one).partition(":")[0] for one in inspect.signature(its).parameters.values()
    ]
    assert get_type_hints(mine) == get_type_hints(its)
    for name, parameter in inspect.signature(its).parameters.items():
        assert inspect.signature(mine).parameters[name].default == parameter.default


class Filter(TypedDict, total=False):
    partition: Partition | None
    died_from: datetime | None


class Facade(Bounded):
    @verb("POST", "/topics/{topic}/groups/{group}/do", tag="groups", right="admin", answer=CountOut, repeat="dry_run")
    def do(self, topic: str, group: str, key: str, *, dry_run: bool = False, **which: Unpack[Filter]) -> int:
        """Does it."""
        return len((topic, group, key, dry_run, which))

    @verb("GET", "/topics/{topic}/at/{offset}", tag="topics", right="consume", answer=list[int], names={"most": "max"})
    def look(
        self, topic: str, offset: Offset, *, most: Page = 7, group: Annotated[Name | None, Help("Whose.")] = None
    ) -> list[int]:
        """Looks."""
        return [len((topic, offset, most, group))]

    @verb("GET", "/topics/{topic}/none/{offset}", tag="topics", right="consume", answer=list[int], nowhere=[])
    def none(self, topic: str, offset: Offset) -> list[int]:
        """Finds nothing where nothing can be."""
        return [len((topic, offset))]

    @verb("POST", "/everything", tag="topics", right="admin", answer=None)
    def every(self, *, offsets: list[Offset] | None = None, reason: Reason = None) -> None:
        """Needs no body."""


DO, LOOK, NONE, EVERY = declared(Facade).values()


def test_what_a_request_contains_is_made_of_the_parameters() -> None:
    assert DO.body is not None
    assert DO.body.__struct_fields__ == ("key", "dry_run", "partition", "died_from")
    assert DO.body_required
    assert EVERY.body is not None
    assert not EVERY.body_required, "nothing in it is"
    assert LOOK.body is None
    assert LOOK.query.__struct_encode_fields__ == ("max", "group")
    (schema,), components = msgspec.json.schema_components([LOOK.query])
    properties = components[schema["$ref"].rpartition("/")[2]]["properties"]
    assert properties["group"]["description"] == "Whose.", "outside of the union, where it is found"
    assert (properties["max"]["maximum"], properties["max"]["default"]) == (LISTED, 7)
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(b'{"key": "k", "partition": -1}', type=DO.body)


def test_a_number_without_bounds_is_refused_when_it_is_declared() -> None:
    @verb("POST", "/x", tag="topics", right="admin", answer=None)
    def wrong(self: object, number: int) -> None:
        """Has a number of any size."""

    with pytest.raises(TypeError, match="bounds"):
        assert wrong.__verb__.body  # type: ignore[attr-defined]


class Client:
    """In place of a client: notes what would be sent."""

    def __init__(self, answer: Any = None, missing: Exception | None = None) -> None:
        self.answer, self.missing = answer, missing
        self._patience: dict[str, dict[str, float]] = {}
        self.sent: list[tuple[str, str, Any]] = []

    def _call(self, method: str, path: str, answer: Any, **given: Any) -> Any:
        shape = given.get("body") or given.get("query")
        self.sent.append((method, path, None if shape is None else msgspec.to_builtins(shape)))
        if answer == dict[str, Any] and self.missing is not None:
            raise self.missing
        self.repeat = given.get("repeat")
        return self.answer


def test_a_call_is_one_request() -> None:
    client = Client(CountOut(3))
    assert method_of(DO)(client, "orders", "a.b", "k", dry_run=True, partition=2) == 3
    assert client.sent == [("POST", "/topics/orders/groups/a.b/do", {"key": "k", "dry_run": True, "partition": 2})]
    assert client.repeat is True, "twice is as good as once, if nothing changes"
    method_of(DO)(client, "orders", "g", "k")
    assert client.repeat is False
    with pytest.raises(TypeError, match="key"):
        method_of(DO)(client, "orders", "g")


def test_a_list_has_as_many_as_were_asked_for() -> None:
    for limit, sent in ((0, {"max": 1}), (2, {"max": 2}), (LISTED + 1, {"max": LISTED})):
        client = Client([1, 2, 3])
        assert method_of(LOOK)(client, "orders", 5, most=limit) == [1, 2, 3][:limit]
        assert client.sent == [("GET", "/topics/orders/at/5", sent)]


def test_what_is_nowhere_is_answered_as_by_the_verb_itself() -> None:
    client = Client()
    with pytest.raises(TopicNotFound):
        method_of(LOOK)(client, "a/b", 5)
    with pytest.raises(GroupNotFound):
        method_of(DO)(client, "orders", "..", "k")
    assert client.sent == [], "a name that cannot be one is not asked for"
    with pytest.raises(OffsetOutOfRange):
        method_of(LOOK)(client, "orders", -1)
    with pytest.raises(PartitionNotFound):
        method_of(DO)(client, "orders", "g", "k", partition=-1)
    assert method_of(NONE)(client, "orders", -1) == []
    thing = "/topics/orders"
    assert [path for _, path, _ in client.sent] == [thing, f"{thing}/groups/g", thing], "whether it is there at all"
    with pytest.raises(TopicNotFound):
        method_of(NONE)(Client(missing=TopicNotFound()), "orders", -1)
    client = Client([])
    method_of(LOOK)(client, "orders", LARGEST + 1)
    assert client.sent[0][1] == f"/topics/orders/at/{LARGEST}"
    method_of(EVERY)(client, offsets=[-1, 4, LARGEST + 1])
    assert client.sent[1][2] == {"offsets": [4]}, "what nobody has is not sent"


def test_filters_are_checked_by_their_names_and_types() -> None:
    assert Facade().do("orders", "g", "k", partition=1) == 5
    with pytest.raises(InvalidArgument, match=r"do has no parameter 'partion'\. Did you mean 'partition'"):
        Facade().do("orders", "g", "k", partion=1)  # type: ignore[call-arg]
    with pytest.raises(InvalidArgument, match="partition cannot be '1'"):
        Facade().do("orders", "g", "k", partition="1")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="time zone"):
        Facade().do("orders", "g", "k", died_from=datetime(2030, 1, 1))


@pytest.mark.parametrize(
    ("name", "found", "given", "answer"),
    [
        ("release_key", 3, {}, CountOut(3)),
        ("redrive", [(0, 7)], {"dry_run": True}, RedrivenOut.of([(0, 7)], dry_run=True)),
        ("in_flight", {0: (1, 2.5)}, {"topic": "orders"}, InFlightOut.of({0: (1, 2.5)}, topic="orders")),
        ("skip", None, {}, None),
        (
            "rewind",
            [Rewound(partition=0, target=1, messages=2)],
            {"dry_run": False},
            RewindOut.of([Rewound(partition=0, target=1, messages=2)], dry_run=False),
        ),
    ],
)
def test_an_answer_is_the_value_and_what_was_asked(name: str, found: Any, given: dict[str, Any], answer: Any) -> None:
    assert VERBS[name].answered(found, given) == answer
    assert VERBS[name].value(answer) == found


def test_every_function_that_is_called_is_known_with_its_parameters() -> None:
    files = Path(custody.__file__).parent.rglob("*.py")
    calls = re.compile(r'(?:_rows|_value|\bdb\.call|_db\.call|call_dicts)\(\s*"(\w+)"')
    called = {name for file in files for name in calls.findall(file.read_text())}
    assert len(called) > 80
    assert {name for name in called if not isinstance(parameters_of(name), tuple)} == set()
    assert set(parameters_of("redrive")) >= {"topic", "group", "filter", "actor", "now"}
    assert parameters_of("server_facts") == ()
