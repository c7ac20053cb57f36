"""What can be asked for behind the question mark of an address."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from custody.model import DEFAULT_GROUP
from custody.wire.fields import Duration, Name, Offset, Partition, Positive, Text, Timeout, When
from custody.wire.requests import Shape

MOST = 10_000
"""So many messages an answer has at most."""

Page = Annotated[int, Meta(ge=1, le=100_000, description="The most that are listed.")]
Batch = Annotated[int, Meta(ge=1, le=MOST, description="The most messages of one answer.")]


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


class LimitQuery(Shape):
    limit: Page = 1000


class DelayedQuery(Shape):
    key: Annotated[Text | None, Meta(description="Only those of this key.")] = None
    limit: Page = 100


class ReadQuery(Shape):
    offset: Annotated[Offset | None, Meta(description="From this offset on; without it and a time, the first.")] = None
    time: Annotated[When | None, Meta(description="From what was published at this time on.")] = None
    max: Batch = 100


class FetchQuery(Shape):
    partition: Annotated[Partition, Meta(description="The partition to read.")] = 0
    max: Batch = 100


class EpochQuery(Shape):
    epoch: Annotated[Positive | None, Meta(description="Only if this is still the epoch.")] = None


class NewsQuery(Shape):
    since: Annotated[
        Text | None, Meta(description="The token of the last answer; without one the answer comes at once.")
    ] = None
    wait: Annotated[Duration | None, Meta(description="How long to wait for news.")] = None


class GroupQuery(Shape):
    group: Annotated[Name | None, Meta(description="Only of this group.")] = None


class TopicGroupQuery(Shape):
    topic: Annotated[Name | None, Meta(description="Only of this topic.")] = None
    group: Annotated[Name | None, Meta(description="Only of groups of this name.")] = None
