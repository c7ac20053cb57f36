"""`Groups` of engine/groups.py for asyncio. Made by scripts/async_surface.py: do not edit."""

from __future__ import annotations

from typing import Annotated

from msgspec import UNSET, UnsetType

from custody.aio.base import Base
from custody.bridge import run
from custody.model.entities import Group, Message
from custody.model.policy import Policy
from custody.wire.fields import Batch, Help, NewName, Offset, Partition, Reason
from custody.wire.policies import GivenBindings, GivenPolicy, GivenSettings, GivenStart


class Groups(Base):
    """Groups of a topic."""

    async def create_group(
        self,
        topic: str,
        group: NewName,
        policy: GivenPolicy | None = None,
        *,
        start: GivenStart = "earliest",
        bare: Annotated[bool, Help("Only committed offsets: no lifecycle, no policy.")] = False,
        bindings: GivenBindings | None = None,
    ) -> Group:
        """Creates a group. Without a policy it has the defaults. A bare group is only a cursor (`fetch`, `commit`).

        With bindings it gets only the messages that match one of them; the others count as done.
        """
        return await run(lambda: self._of.create_group(topic, group, policy, start=start, bare=bare, bindings=bindings))

    async def change_group(
        self,
        topic: str,
        group: str,
        *,
        policy: GivenSettings | UnsetType = UNSET,
        bindings: GivenBindings | UnsetType | None = UNSET,
    ) -> Group:
        """Changes settings of the policy, or replaces all bindings, or both in one transaction. The ordering cannot
        change.

        Omitted settings stay unchanged, and others may change them at the same time.
        """
        return await run(lambda: self._of.change_group(topic, group, policy=policy, bindings=bindings))

    async def update_group(self, topic: str, group: str, policy: Policy) -> Group:
        """Replaces the policy of a group, from now on. Its ordering cannot change."""
        return await run(lambda: self._of.update_group(topic, group, policy))

    async def bind(self, topic: str, group: str, bindings: GivenBindings | None) -> Group:
        """Replaces all bindings of a group. Without bindings it gets every message.

        They apply to messages that the group has not reached yet, and after a `rewind` to older ones too.
        """
        return await run(lambda: self._of.bind(topic, group, bindings))

    async def delete_group(self, topic: str, group: str) -> None:
        """Deletes a group and its state. The messages stay in the log."""
        return await run(lambda: self._of.delete_group(topic, group))

    async def groups(self, topic: str) -> list[Group]:
        """The groups of a topic."""
        return await run(lambda: self._of.groups(topic))

    async def group(self, topic: str, group: str) -> Group:
        """One group with its policy."""
        return await run(lambda: self._of.group(topic, group))

    async def pause(self, topic: str, group: str, *, reason: Reason = None) -> bool:
        """Stops delivering messages to a group. Messages in flight can still be settled.

        False if the group was already paused.
        """
        return await run(lambda: self._of.pause(topic, group, reason=reason))

    async def resume(self, topic: str, group: str) -> bool:
        """Delivers messages to a paused group again, and closes an open circuit breaker.

        False if there was nothing to resume.
        """
        return await run(lambda: self._of.resume(topic, group))

    async def next_due(self, topic: str, group: str) -> float | None:
        """Seconds until the group's next timed event: a retry, an expiring lease, or the next probe of an open circuit
        breaker. None if there is none, or while the group is paused.
        """
        return await run(lambda: self._of.next_due(topic, group))

    async def fetch(
        self,
        topic: str,
        group: str,
        partition: Annotated[Partition, Help("The partition to read.")] = 0,
        *,
        max_messages: Batch = 100,
    ) -> list[Message]:
        """For a bare group: the messages after its committed position. Nothing is recorded until `commit`."""
        return await run(lambda: self._of.fetch(topic, group, partition, max_messages=max_messages))

    async def commit(self, topic: str, group: str, partition: Partition, next_offset: Offset) -> None:
        """For a bare group: everything below `next_offset` is done."""
        return await run(lambda: self._of.commit(topic, group, partition, next_offset))
