"""Groups and their lifecycle: `/topics/{topic}/groups`."""

from __future__ import annotations

import msgspec
from msgspec import UNSET

from custody.engine.grouping import GROUP, GROUPS, Start
from custody.errors import InvalidArgument
from custody.http.call import Call
from custody.http.derived import by_hand
from custody.http.operation import Table
from custody.model.plain import plain
from custody.model.routing import Binding
from custody.wire.answers import ChangedOut
from custody.wire.fields import When
from custody.wire.policies import Bindings, GroupIn, GroupPatch
from custody.wire.reports import GroupOut

table = Table("groups")


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


@by_hand
async def resume(call: Call) -> object:
    """Those who wait for messages of the group are served at once."""
    call.allow("admin", call.topic)
    changed = await call.run(call.engine.resume, call.topic, call.group)
    call.state.long_polls.wake(call.topic)
    return ChangedOut(changed)
