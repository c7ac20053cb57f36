"""Query strings."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from custody.model.entities import DEFAULT_GROUP
from custody.model.limits import MOST
from custody.wire.fields import Duration, Name, Text, Timeout
from custody.wire.requests import Shape


class NoQuery(Shape):
    """No parameters."""


class ReceiveQuery(Shape):
    group: Annotated[Name, Meta(description="The group that receives; `default` is created if it is missing.")] = (
        DEFAULT_GROUP
    )
    max: Annotated[int, Meta(ge=1, le=MOST, description="Most messages of the lease.")] = 1
    visibility_timeout: Annotated[
        Timeout | None, Meta(description="Time until the lease expires; by default that of the group.")
    ] = None
    wait: Annotated[Duration | None, Meta(description="How long to wait for a message if there is none.")] = None
    create: Annotated[bool, Meta(description="Whether to create the group `default` if it is missing.")] = True
    ack: Annotated[
        Text | None,
        Meta(description="First ack what is left of this lease, or the message of this receipt; see `settled`."),
    ] = None
    auto_ack: Annotated[bool, Meta(description="Ack messages before they are sent: delivery at most once.")] = False


class WakeupQuery(Shape):
    since: Annotated[
        Text | None, Meta(description="The token of the last answer; without it the answer comes at once.")
    ] = None
    wait: Annotated[Duration | None, Meta(description="How long to wait for something to be published.")] = None
