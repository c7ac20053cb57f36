"""`Ensuring` of engine/ensuring.py for asyncio. Made by scripts/async_surface.py: do not edit."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import UNSET, UnsetType

from custody.aio.derived.groups import Groups
from custody.aio.derived.topics import Topics
from custody.bridge import run
from custody.model.entities import Group, Topic
from custody.model.policy import Duration, Policy
from custody.model.retention import Retention
from custody.model.routing import Binding
from custody.model.start import Start


class Ensuring(Groups, Topics):
    """Verbs that a program can call each time it starts."""

    async def ensure_topic(
        self,
        name: str,
        *,
        partitions: int | None = None,
        max_depth: int | None = None,
        priorities: bool | None = None,
        starvation_limit: Duration | None = None,
        retention: Retention | None = None,
    ) -> Topic:
        """Creates a topic, or adds partitions to it and sets its retention if they differ.

        Settings that are left out are not compared. A difference that cannot be removed is refused
        (`settings_differ`): fewer partitions, another depth or starvation limit, with or without priorities.
        """
        return await run(
            lambda: self._of.ensure_topic(
                name,
                partitions=partitions,
                max_depth=max_depth,
                priorities=priorities,
                starvation_limit=starvation_limit,
                retention=retention,
            )
        )

    async def ensure_group(
        self,
        topic: str,
        group: str,
        policy: Policy | None = None,
        *,
        start: Start = "earliest",
        bare: bool | None = None,
        bindings: Iterable[Binding | str] | UnsetType | None = UNSET,
    ) -> Group:
        """Creates a group, or gives it this policy and these bindings if they differ.

        What is left out is not compared, and neither is `start`: the group is where it is. Another ordering, or a bare
        group where one with a policy is wanted, is refused (`settings_differ`).
        """
        return await run(lambda: self._of.ensure_group(topic, group, policy, start=start, bare=bare, bindings=bindings))
