"""Groups and their lifecycle: `/topics/{topic}/groups`."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET

from custody.engine import Start
from custody.errors import InvalidArgument
from custody.http.call import Call
from custody.http.operation import Table
from custody.model import BlockedKey, Stats
from custody.plain import plain
from custody.routing import Binding
from custody.wire.answers import ChangedOut, CountOut, DueOut, RedrivenOut, RewindOut
from custody.wire.fields import When
from custody.wire.messages import DeadOut, MessageOut
from custody.wire.policies import Bindings, GroupIn, GroupPatch
from custody.wire.queries import FetchQuery, LimitQuery
from custody.wire.reports import GroupOut
from custody.wire.requests import CommitIn, KeyIn, ReasonIn, RedriveIn, RewindIn, SkipIn

table = Table("groups")

GROUPS = "/topics/{topic}/groups"
GROUP = GROUPS + "/{group}"


@table.operation(
    "POST",
    GROUPS,
    body=GroupIn,
    answer=GroupOut,
    status=201,
    example={"name": "stock", "policy": {"ordering": "key", "max_attempts": 5}, "start": "earliest"},
)
async def create_group(call: Call) -> object:
    """Make a group.

    Without a policy it has the defaults. A bare one is only a cursor. With bindings it gets the messages that one of
    them matches.
    """
    call.allow("admin", call.topic)
    body: GroupIn = call.body
    made = await call.run(
        call.engine.create_group,
        call.topic,
        body.name,
        None if body.policy is None else body.policy.value(),
        start=_start(body.start),
        bare=body.bare,
        bindings=_bindings(body.bindings),
    )
    return plain(made)


def _start(start: str | int) -> Start:
    if isinstance(start, int) or start in ("earliest", "latest"):
        return start  # type: ignore[return-value]  # a text that is one of the two words
    try:
        return msgspec.convert(start, When)
    except msgspec.ValidationError:
        raise InvalidArgument(
            f"start cannot be {start!r}",
            'It is "earliest", "latest", an offset, or a time such as 2026-01-31T12:00:00Z.',
            path="$.start",
        ) from None


def _bindings(given: Bindings | None) -> list[Binding | str] | None:
    if given is None:
        return None
    found: list[Binding | str] = []
    for number, one in enumerate(given):
        try:
            found.append(Binding(one) if isinstance(one, str) else one.value())
        except InvalidArgument as error:
            raise InvalidArgument(error.message, error.remedy, path=f"$.bindings[{number}]") from error
    return found


@table.operation("GET", GROUPS, answer=list[GroupOut])
async def groups(call: Call) -> object:
    """The groups of a topic."""
    call.allow("consume", call.topic)
    return plain(await call.run(call.engine.groups, call.topic))


@table.operation("GET", GROUP, answer=GroupOut)
async def group(call: Call) -> object:
    """One group with its policy."""
    call.allow("consume", call.topic)
    return plain(await call.run(call.engine.group, call.topic, call.group))


@table.operation("PATCH", GROUP, body=GroupPatch, answer=GroupOut, example={"policy": {"max_attempts": 10}})
async def change_group(call: Call) -> object:
    """Change fields of the policy, or replace the bindings. The ordering stays."""
    call.allow("admin", call.topic)
    body: GroupPatch = call.body
    if body.policy is UNSET and body.bindings is UNSET:
        raise InvalidArgument("there is nothing to change", "Give policy or bindings.")
    changed = await call.run(
        call.state.verbs.change_group,
        call.topic,
        call.group,
        None if body.policy is UNSET else body.policy.value,
        UNSET if body.bindings is UNSET else _bindings(body.bindings),
        actor=call.worker,
    )
    return plain(changed)


@table.operation("DELETE", GROUP, answer=None, status=204)
async def delete_group(call: Call) -> object:
    """Remove a group and all it knows."""
    call.allow("admin", call.topic)
    await call.run(call.engine.delete_group, call.topic, call.group)
    return None


@table.operation("GET", GROUP + "/stats", answer=Stats)
async def stats(call: Call) -> object:
    """The figures of a group, in all and for each partition."""
    call.allow("consume", call.topic)
    return plain(await call.run(call.engine.stats, call.topic, call.group))


@table.operation("GET", GROUP + "/due", answer=DueOut)
async def next_due(call: Call) -> object:
    """When something is due by itself: a retry, an expiring lease, a probe."""
    call.allow("consume", call.topic)
    return DueOut(await call.run(call.engine.next_due, call.topic, call.group))


@table.operation("GET", GROUP + "/dead", query=LimitQuery, answer=list[DeadOut])
async def dead(call: Call) -> object:
    """The dead letters, with payload and errors."""
    call.allow("consume", call.topic)
    return plain(await call.run(call.engine.dead, call.topic, call.group, limit=call.query.limit))


async def _dead_ones(call: Call, verb: Any) -> RedrivenOut:
    call.allow("admin", call.topic)
    body: RedriveIn = call.body or RedriveIn()
    call.require_batch(len(body.offsets or ()))
    given = {name: getattr(body, name) for name in body.__struct_fields__}
    found: list[tuple[int, int]] = await call.run(verb, call.topic, call.group, **given)
    return RedrivenOut.of(found, dry_run=body.dry_run)


@table.operation(
    "POST",
    GROUP + "/redrive",
    body=RedriveIn,
    body_required=False,
    answer=RedrivenOut,
    example={"where_error": "timeout%", "dry_run": True},
)
async def redrive(call: Call) -> object:
    """Dead messages become ready, with a fresh budget: all, or those that are chosen."""
    return await _dead_ones(call, call.engine.redrive)


@table.operation(
    "POST",
    GROUP + "/discard",
    body=RedriveIn,
    body_required=False,
    answer=RedrivenOut,
    example={"key": "SKU-123", "reason": "the order was cancelled"},
)
async def discard(call: Call) -> object:
    """Dead messages are given up for good, with the same choice as redrive."""
    return await _dead_ones(call, call.engine.discard)


@table.operation("POST", GROUP + "/rewind", body=RewindIn, answer=RewindOut, example={"to_offset": 0})
async def rewind(call: Call) -> object:
    """Everything from an offset or a time on is delivered again; leases over it are revoked."""
    call.allow("admin", call.topic)
    body: RewindIn = call.body
    given = {name: getattr(body, name) for name in body.__struct_fields__}
    found = await call.run(call.engine.rewind, call.topic, call.group, **given)
    return RewindOut.of(found, dry_run=body.dry_run)


@table.operation(
    "POST",
    GROUP + "/pause",
    body=ReasonIn,
    body_required=False,
    answer=ChangedOut,
    example={"reason": "the shop is closed"},
)
async def pause(call: Call) -> object:
    """Hand out nothing; what is in flight can be settled."""
    call.allow("admin", call.topic)
    reason = None if call.body is None else call.body.reason
    return ChangedOut(await call.run(call.engine.pause, call.topic, call.group, reason=reason))


@table.operation("POST", GROUP + "/resume", answer=ChangedOut)
async def resume(call: Call) -> object:
    """Go on after a pause, and close an open circuit breaker."""
    call.allow("admin", call.topic)
    changed = await call.run(call.engine.resume, call.topic, call.group)
    call.state.long_polls.wake(call.topic)
    return ChangedOut(changed)


@table.operation("GET", GROUP + "/blocked", query=LimitQuery, answer=list[BlockedKey])
async def blocked(call: Call) -> object:
    """Keys that cannot go on, what each waits for, and how much waits behind it."""
    call.allow("consume", call.topic)
    return plain(await call.run(call.engine.blocked_keys, call.topic, call.group, limit=call.query.limit))


@table.operation("POST", GROUP + "/blocked/release", body=KeyIn, answer=CountOut, example={"key": "SKU-123"})
async def release_key(call: Call) -> object:
    """Let a key go on past its held dead messages, which stay dead."""
    call.allow("admin", call.topic)
    body: KeyIn = call.body
    return CountOut(await call.run(call.engine.release_key, call.topic, call.group, body.key, reason=body.reason))


@table.operation(
    "POST", GROUP + "/blocked/skip", body=SkipIn, answer=None, status=204, example={"partition": 0, "offset": 42}
)
async def skip(call: Call) -> object:
    """Count one waiting or dead message as done."""
    call.allow("admin", call.topic)
    body: SkipIn = call.body
    await call.run(call.engine.skip, call.topic, call.group, body.partition, body.offset, reason=body.reason)
    return None


@table.operation("GET", GROUP + "/fetch", query=FetchQuery, answer=list[MessageOut])
async def fetch(call: Call) -> object:
    """For a bare group: the messages after its committed position."""
    call.allow("consume", call.topic)
    query: FetchQuery = call.query
    found = await call.run(call.engine.fetch, call.topic, call.group, query.partition, max_messages=query.max)
    return [MessageOut.of(message) for message in found]


@table.operation(
    "POST", GROUP + "/commit", body=CommitIn, answer=None, status=204, example={"partition": 0, "next_offset": 7}
)
async def commit_position(call: Call) -> object:
    """For a bare group: everything below the offset is done."""
    call.allow("consume", call.topic)
    body: CommitIn = call.body
    await call.run(call.engine.commit, call.topic, call.group, body.partition, body.next_offset)
    return None
