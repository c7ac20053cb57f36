"""What can be asked for behind the question mark of an address."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from custody.model.entities import DEFAULT_GROUP
from custody.wire.fields import MOST, Duration, Name, Text, Timeout
from custody.wire.requests import Shape


class NoQuery(Shape):
    """No parameters."""


class ReceiveQuery(Shape):
    group: Annotated[Name, Meta(description="The group that receives; `default` is made when it is missing.")] = (
        DEFAULT_GROUP
    )
    max: Annotated[int, Meta(ge=1, le=MOST, description="The most messages of one lease.")] = 1
    visibility_timeout: Annotated[
        Timeout | None, Meta(description="How long they are leased; without it, as long as the group says.")
    ] = None
    wait: Annotated[Duration | None, Meta(description="How long to wait for a message if there is none.")] = None
    create: Annotated[bool, Meta(description="Whether a missing group `default` is made.")] = True
    auto_ack: Annotated[bool, Meta(description="Done as soon as they are sent: at most once.")] = False


class NewsQuery(Shape):
    since: Annotated[
        Text | None, Meta(description="The token of the last answer; without one the answer comes at once.")
    ] = None
    wait: Annotated[Duration | None, Meta(description="How long to wait for news.")] = None
