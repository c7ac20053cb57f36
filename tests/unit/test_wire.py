"""What goes over HTTP: each value comes out at the other end as it went in."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import msgspec
import pytest

from custody import Custody
from custody.errors import InvalidPolicy
from custody.model.entities import (
    DeadLetter,
    Delayed,
    Group,
    Journal,
    JournalPart,
    Message,
    Producer,
    Receipt,
    Rewound,
    Settled,
    Topic,
    Waiting,
)
from custody.model.plain import plain
from custody.model.policy import Breaker, Constant, Exponential, Linear, Policy
from custody.model.retention import Retention
from custody.model.routing import Binding
from custody.wire import fields
from custody.wire.answers import InFlightOut, ProducerOut, RedrivenOut, RewindOut
from custody.wire.messages import DeadOut, DelayedOut, MessageOut, PlacedOut
from custody.wire.policies import BindingIn, PolicyIn, RetentionIn
from custody.wire.queries import ReceiveQuery
from custody.wire.reports import GroupOut, JournalOut, TopicOut
from custody.wire.requests import MessageIn, Shape
from custody.wire.settled import SettledOut
from custody.wire.verb import declared

pytestmark = pytest.mark.core

AT = datetime(2030, 1, 1, 12, 30, 0, 123456, tzinfo=UTC)
SECOND = timedelta(seconds=1)


def answered(answer: object, kind: type[Any]) -> Any:
    """What a client makes of an answer."""
    return msgspec.json.decode(msgspec.json.encode(answer), type=kind, strict=False).value()


def sent(request: Shape) -> Any:
    """What a server reads of a request."""
    body = msgspec.json.encode(request, enc_hook=fields.write)
    return msgspec.json.decode(body, type=type(request), dec_hook=fields.read)


def message(payload: object) -> dict[str, Any]:
    return {
        "topic": "orders",
        "partition": 1,
        "offset": 7,
        "key": "k",
        "payload": payload,
        "headers": {"a": "ü"},
        "attempt": 2,
        "published_at": AT,
    }


PAYLOADS = [{"sku": 1}, [1.5, None], "text", None, b"\x00\xff", b""]


@pytest.mark.parametrize("payload", PAYLOADS)
def test_a_message_comes_back_as_it_was(payload: object) -> None:
    for one in (Message(**message(payload)), Message(**message(payload), priority="high")):
        assert answered(MessageOut.of(one, "lease:7"), MessageOut) == one
    dead = DeadLetter(
        **message(payload), attempts=2, reason="attempts", last_error="x", errors=("x", "y"), died_at=AT, held=True
    )
    assert answered(plain(dead), DeadOut) == dead
    waiting = Waiting(
        topic="orders",
        partition=0,
        delay_id=3,
        deliver_at=AT,
        delayed_at=AT,
        key=None,
        payload=payload,
        headers={},
    )
    assert answered(plain(waiting), DelayedOut) == waiting


@pytest.mark.parametrize(
    "placed",
    [Receipt("orders", 0, 4, True), Delayed(topic="orders", partition=0, delay_id=3, deliver_at=AT, duplicate=True)],
)
def test_a_receipt_comes_back_as_it_was(placed: Receipt | Delayed) -> None:
    assert answered(placed, PlacedOut) == placed, "as the receipts of a publish are sent"
    assert answered(PlacedOut.of(placed), PlacedOut) == placed
    producer = Producer(producer_id="p", epoch=2, last_sequence=9, last_receipt=placed)
    assert answered(ProducerOut.of(producer), ProducerOut) == producer


def test_results_come_back_as_they_were() -> None:
    settled = Settled(settled=3, dead=(4,), released=(5, 6))
    assert answered(SettledOut.of(settled), SettledOut) == settled
    flight: dict[int, tuple[int, float | None]] = {0: (3, 1.5), 1: (0, None)}
    assert answered(InFlightOut.of(flight, topic="orders"), InFlightOut) == flight
    assert answered(RedrivenOut.of([(0, 1), (2, 3)], dry_run=True), RedrivenOut) == [(0, 1), (2, 3)]
    rewound = [Rewound(partition=0, target=5, messages=2)]
    assert answered(RewindOut.of(rewound, dry_run=False), RewindOut) == rewound


POLICIES = [
    Policy(),
    Policy(backoff=Linear("2s", cap="10s", jitter=0.2), handler_timeout=5, max_ack_holes=None, dead_letter="topic"),
    Policy(backoff=Constant(timedelta(seconds=3)), breaker=Breaker(window="20s"), max_in_flight=5, max_parked=7),
    Policy(backoff=Exponential("1s", multiplier=3), ordering="key", on_dead="hold", fairness="tenant"),
]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_means_the_same_at_both_ends(policy: Policy) -> None:
    assert sent(PolicyIn.of(policy)).value().columns() == policy.columns()
    group = Group(
        topic="orders",
        name="g",
        bare=False,
        policy=policy,
        paused_at=AT,
        paused_reason="why",
        created_at=AT,
        bindings=(Binding("a.>"), Binding(headers={"h": "1"})),
    )
    came = answered(plain(group), GroupOut)
    assert came.policy.columns() == policy.columns()
    assert came.policy.visibility_timeout == timedelta(seconds=30), "as the database itself would give it"
    assert (came.bindings, came.paused_at, came.created_at) == (group.bindings, AT, AT)


def test_what_a_policy_leaves_out_stays_as_it_was() -> None:
    before = Policy(ordering="key", max_attempts=9, breaker=Breaker())
    changed = Policy.from_mapping({**plain(before), **sent(PolicyIn(breaker=None)).given()})
    assert changed == Policy(ordering="key", max_attempts=9)
    with pytest.raises(InvalidPolicy):
        sent(PolicyIn(on_dead="hold")).value()


def test_what_is_kept_comes_back_as_it_was() -> None:
    kept = Retention(time=3600 * SECOND, size=2**30, segment_time=60 * SECOND, segment_size=2**20)
    for retention, limit in ((kept, None), (None, 5 * SECOND)):
        topic = Topic(
            name="orders",
            uid=UUID(int=7),
            partitions=2,
            max_depth=10,
            created_at=AT,
            tails=(5, 6),
            first_offsets=(0, 1),
            retention=retention,
            starvation_limit=limit,
        )
        assert answered(plain(topic), TopicOut) == topic
    part = JournalPart(part=1, created_at=AT, sealed_at=None, bytes=9)
    for time in (None, 86400 * SECOND):
        journal = Journal(keep_time=time, keep_size=None, dropped_until=AT, parts=(part,))
        assert answered(plain(journal), JournalOut) == journal


def test_requests_are_read_as_they_were_meant() -> None:
    create, change = (declared(Custody)[name].body for name in ("create_topic", "change_topic"))
    assert create is not None
    assert change is not None
    retention = Retention(time="7d", size="512MB", drop_unresolved=True)
    body = sent(create(name="orders", starvation_limit=fields.Timeout.of("5m"), retention=RetentionIn.of(retention)))
    assert body.starvation_limit == 300
    assert body.retention.value().columns() == retention.columns()
    assert sent(change(retention=None)).retention is None, "null keeps everything"
    assert sent(change(partitions=3)).retention is msgspec.UNSET
    binding = Binding("a.*", headers={"h": "1"})
    assert sent(BindingIn.of(binding)).value() == binding
    assert sent(change(retention=RetentionIn.of({"size": 5}))).retention.size == 5


def test_what_is_as_by_default_is_not_sent() -> None:
    assert msgspec.json.encode(MessageIn(payload=msgspec.Raw(b"1"))) == b'{"payload":1}'
    query = ReceiveQuery(max=10, visibility_timeout=fields.Timeout.of("30s"))
    assert msgspec.to_builtins(query, enc_hook=fields.write) == {"max": 10, "visibility_timeout": 30.0}
