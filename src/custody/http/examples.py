"""An example of every answer for the API description, as values of the answers' types."""

from __future__ import annotations

from dataclasses import is_dataclass
from datetime import UTC, datetime, timedelta
from types import GenericAlias
from typing import Any, get_args
from uuid import UUID

import msgspec

from custody.model.entities import (
    BlockedKey,
    HistoryEntry,
    Kept,
    OpenTransaction,
    PartitionStats,
    Replayed,
    Segment,
    Stats,
    StoredState,
    Upkeep,
)
from custody.model.insights import Bin, LeaseStatus, OffsetMap, Server, TopicFigures
from custody.model.plain import plain
from custody.model.policy import Exponential, Policy
from custody.model.status import GroupStatus, OutboxStatus, ScheduleStatus, Status, WorkerStatus
from custody.wire.answers import (
    AbortedOut,
    AddedOut,
    BegunOut,
    ChangedOut,
    CommittedOut,
    CountOut,
    DeadlineOut,
    DueOut,
    FlightOut,
    HealthOut,
    InFlightOut,
    PlaceOut,
    ProducerOut,
    RedrivenOut,
    RewindOut,
    RewoundOut,
    WakeupOut,
)
from custody.wire.messages import DeadOut, DelayedOut, LeaseOut, MessageOut, PlacedOut, ReceiptsOut
from custody.wire.policies import PolicyOut
from custody.wire.reports import GroupOut, HandlingOut, JournalOut, JournalPartOut, RetentionOut, TopicOut
from custody.wire.schedules import ScheduleOut
from custody.wire.settled import SettledOut

_AT = datetime(2026, 1, 31, 12, 0, tzinfo=UTC)
_LATER = _AT + timedelta(seconds=30)
_TOPIC = UUID("b3c4a3a2-58a5-4c30-9d13-6f0e6b6a6c51")
_LEASE = UUID("3f0c6f4e-6d7b-4f2c-9a63-0c8a5d2f1b7e")
_TRANSACTION = UUID("0b6f5a52-8a3e-4a5b-9a54-5d1f3d8f0c11")
_PAYLOAD = {"sku": "SKU-123", "add": 100}
_PLACED = PlacedOut(topic="orders", partition=0, offset=42, duplicate=False)
_MESSAGE: dict[str, Any] = {
    "topic": "orders",
    "partition": 0,
    "offset": 42,
    "key": "SKU-123",
    "payload": _PAYLOAD,
    "headers": {"source": "shop"},
    "published_at": _AT,
    "topic_uid": _TOPIC,
}
_POLICY = Policy(ordering="key", max_attempts=5, backoff=Exponential("2s"))
_FIGURES: dict[str, Any] = {"lag": 10, "waiting": 1, "in_flight": 2, "holes": 1, "parked": 3, "dead": 1, "depth": 16}

_EXAMPLES: tuple[Any, ...] = (
    _PLACED,
    ReceiptsOut([_PLACED]),
    AddedOut(_TRANSACTION, messages=2),
    CountOut(3),
    MessageOut(**_MESSAGE, attempt=0),
    DelayedOut(
        topic="orders",
        partition=0,
        delay_id=7,
        deliver_at=_LATER,
        delayed_at=_AT,
        key="SKU-123",
        payload=_PAYLOAD,
        headers={},
        duplicate=False,
    ),
    LeaseOut(
        lease_id=_LEASE,
        deadline=_LATER,
        messages=[MessageOut(**_MESSAGE, attempt=1, receipt=f"{_LEASE}:42")],
        settled=SettledOut(1),
    ),
    WakeupOut("orders-17", woken=True),
    SettledOut(1),
    DeadlineOut(_LATER),
    TopicOut(
        name="orders",
        uid=_TOPIC,
        partitions=2,
        message_count=85,
        first_offsets=(0, 0),
        tails=(43, 42),
        max_depth=None,
        priorities=False,
        starvation_limit=None,
        retention=RetentionOut(time=604_800, size=None, segment_time=None, segment_size=None, drop_unresolved=False),
        created_at=_AT,
    ),
    InFlightOut("orders", {"0": FlightOut(2, 12.5), "1": FlightOut(0, None)}),
    Segment(
        segment=1,
        created_at=_AT,
        sealed_at=_LATER,
        messages=85,
        bytes=65_536,
        from_time=_AT,
        until_time=_LATER,
        held_group="stock",
        held_partition=0,
        held_offset=42,
    ),
    Kept(events=3, bytes=16_384),
    Upkeep(
        topic="orders",
        did="dropped",
        segment=1,
        messages=85,
        bytes=65_536,
        kept=3,
        lost=0,
        held_group=None,
        held_partition=None,
        held_offset=None,
    ),
    JournalOut(
        keep_time=7_776_000,
        keep_size=None,
        dropped_until=None,
        parts=[JournalPartOut(part=0, created_at=_AT, sealed_at=None, bytes=1_048_576)],
    ),
    GroupOut(
        topic="orders",
        name="stock",
        bare=False,
        policy=msgspec.convert(plain(_POLICY), PolicyOut),
        paused_at=None,
        paused_reason=None,
        created_at=_AT,
        bindings=[],
    ),
    Stats(
        topic="orders",
        group="stock",
        **_FIGURES,
        oldest_unresolved=_AT,
        tail=(43,),
        partitions=(
            PartitionStats(
                partition=0,
                first_offset=0,
                tail=43,
                frontier=33,
                **_FIGURES,
                oldest_unresolved=27,
                oldest_unresolved_at=_AT,
            ),
        ),
        paused_reason=None,
        paused_at=None,
        breaker="closed",
        breaker_reason=None,
    ),
    DueOut(1.5),
    DeadOut(
        **_MESSAGE,
        attempt=5,
        attempts=5,
        reason="max_retries_exceeded",
        last_error="timeout",
        last_traceback='  File "/app/stock.py", line 12, in handle\n    reserve(order)\nTimeoutError: timeout',
        errors=("attempt 4: refused", "attempt 5: timeout"),
        died_at=_LATER,
        held=False,
    ),
    RedrivenOut(1, dry_run=False, messages=[PlaceOut(0, 42)]),
    RewindOut(dry_run=False, partitions=[RewoundOut(0, 0, 43)]),
    ChangedOut(changed=True),
    StoredState(
        key="SKU-123",
        state={"pieces": 7},
        partition=0,
        offset=42,
        claim=3,
        updated_at=_AT,
        expires_at=_LATER,
    ),
    BlockedKey(
        partition=0,
        key="SKU-123",
        blocked_by=42,
        why="backoff",
        attempts=2,
        run_at=_LATER,
        last_error="timeout",
        worker="worker-1",
        since=_AT,
        parked=3,
    ),
    OffsetMap(
        partition=0,
        first_offset=0,
        until_offset=1000,
        frontier=800,
        width=5,
        bins=(Bin(first_offset=40, in_flight=0, waiting=1, parked=3, dead=0),),
    ),
    Bin(first_offset=40, in_flight=0, waiting=1, parked=3, dead=0),
    LeaseStatus(
        lease_id=_LEASE, partition=0, worker="worker-1", messages=10, attempt=1, claimed_at=_AT, deadline=_LATER
    ),
    ProducerOut(producer_id="order-service-1", epoch=1, last_sequence=41, last_receipt=_PLACED),
    BegunOut(_TRANSACTION, expires_at=_LATER),
    CommittedOut(_TRANSACTION, [_PLACED]),
    AbortedOut(_TRANSACTION, aborted=True),
    OpenTransaction(
        transaction_id=_TRANSACTION,
        producer_id="order-service-1",
        epoch=1,
        begun_at=_AT,
        expires_at=_LATER,
        messages=2,
        acks=1,
    ),
    HistoryEntry(at=_AT, group="stock", kind="nack", attempt=1, worker="worker-1", error="timeout", lease_id=_LEASE),
    Replayed("orders", 0, 43),
    ScheduleOut(
        name="report",
        topic="jobs",
        every=None,
        cron="0 6 * * mon-fri",
        tz="Europe/Berlin",
        missed="skip",
        key=None,
        payload={"kind": "daily"},
        headers={},
        app=None,
        state="active",
        edited=False,
        declared={"cron": "0 6 * * mon-fri"},
        next_at=_LATER,
        last_at=_AT,
        attended_until=None,
        paused_at=None,
        paused_reason=None,
        failed_at=None,
        last_error=None,
        created_at=_AT,
    ),
    "refresh",
    HandlingOut(
        topic="orders",
        group="stock",
        visibility_timeout=30.0,
        leases=1000,
        p50=0.02,
        p99=0.4,
        slowest=1.1,
        expired=0,
        expired_alive=0,
        recommended_visibility_timeout=2.2,
    ),
    Server(
        version_num=180_000,
        version="18.0",
        schema_version=1,
        fsync=True,
        full_page_writes=True,
        synchronous_commit="on",
        old_transactions=(),
        pooled=False,
        listens=True,
        default_isolation="read committed",
    ),
    WorkerStatus(
        topic="orders",
        group="stock",
        worker="worker-1",
        in_flight=20,
        oldest_lease_age=0.8,
        last_claim_age=0.1,
        claimed_rate=210.5,
        done_rate=208.0,
        failed_rate=0.5,
    ),
    Status(
        topics=(TopicFigures(topic="orders", partitions=4, messages=120_000, appended=250_000),),
        groups=(
            GroupStatus(
                topic="orders",
                group="stock",
                trouble=("dead letters",),
                lag=120,
                waiting=3,
                in_flight=20,
                parked=0,
                dead=2,
                depth=143,
                oldest_unresolved_age=4.2,
                claimed_rate=210.5,
                done_rate=208.0,
                failed_rate=0.5,
                workers=1,
                last_claim_age=0.1,
                paused=False,
                breaker=None,
                bound=False,
                pipeline=None,
            ),
        ),
        schedules=(ScheduleStatus(name="report", topic="jobs", state="late", next_at=_LATER, last_error=None),),
        outbox=(
            OutboxStatus(destination="billing", backlog=7, due=7, retrying=1, claimed=0, dead=0, oldest_pending=_AT),
        ),
    ),
    HealthOut("ok"),
    'custody_messages_published_total{topic="orders"} 42.0\n',
)
_BY_TYPE = {type(example): example for example in _EXAMPLES}
_OWN: dict[str, Any] = {
    "nack": SettledOut(1, dead=(42,)),
    "readyz": HealthOut("ready"),
    "redrive": RedrivenOut(1, dry_run=True, messages=[PlaceOut(0, 42)]),
}
"""Examples of single operations, where that of the type would leave something out."""


def example_of(name: str, kind: Any) -> Any:
    """An answer of this type as JSON; `name` is the operation's."""
    if isinstance(kind, GenericAlias):
        return [example_of(name, get_args(kind)[0])]
    example = _OWN.get(name, _BY_TYPE[kind])
    return plain(example) if is_dataclass(example) else msgspec.to_builtins(example)
