"""Topics and groups that are there when a program needs them: made, or brought up to the settings that it gives."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from msgspec import UNSET, UnsetType

from custody.engine.groups import Groups
from custody.engine.topics import Topics
from custody.errors import GroupExists, GroupNotFound, SettingsDiffer, TopicExists, TopicNotFound
from custody.model.entities import Group, Topic
from custody.model.lanes import LANES
from custody.model.policy import Duration, Policy, seconds_or_none
from custody.model.retention import Retention
from custody.model.routing import Binding, bindings_of
from custody.model.start import Start, start_columns
from custody.wire.verb import composed


class Ensuring(Groups, Topics):
    """Verbs that a program can call each time it starts."""

    @composed
    def ensure_topic(
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
        try:
            found = self.topic(name)
        except TopicNotFound:
            try:
                return self.create_topic(
                    name,
                    partitions=1 if partitions is None else partitions,
                    max_depth=max_depth,
                    priorities=bool(priorities),
                    starvation_limit=starvation_limit,
                    retention=retention,
                )
            except TopicExists:  # another process was faster
                found = self.topic(name)
        have = found.partitions // LANES if found.priorities else found.partitions
        more = partitions is not None and partitions > have and not found.priorities
        _require_same(
            f"topic {name!r}",
            {
                "partitions": (have, None if more else partitions),
                "max_depth": (found.max_depth, max_depth),
                "priorities": (found.priorities, priorities),
                "starvation_limit": (seconds_or_none(found.starvation_limit), seconds_or_none(starvation_limit)),
            },
            "Leave the setting out, or use another topic.",
        )
        changes: dict[str, Any] = {"partitions": partitions} if more else {}
        if retention is not None and not retention.holds_in(found.retention):
            changes["retention"] = retention
        return self.change_topic(name, **changes) if changes else found

    @composed
    def ensure_group(
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
        start_columns(start)  # refuses what is no start, also where it does not matter
        try:
            found = self.group(topic, group)
        except GroupNotFound:
            wanted = None if isinstance(bindings, UnsetType) else bindings
            try:
                return self.create_group(topic, group, policy, start=start, bare=bool(bare), bindings=wanted)
            except GroupExists:  # another process was faster
                found = self.group(topic, group)
        _require_same(
            f"group {group!r} of topic {topic!r}",
            {
                "bare": (found.bare, False if policy is not None else bare),
                "ordering": (found.policy and found.policy.ordering, policy and found.policy and policy.ordering),
            },
            "Leave it out, or use another group.",
        )
        changes: dict[str, Any] = {}
        if policy is not None and found.policy is not None and policy.columns() != found.policy.columns():
            changes["policy"] = policy.plain()
        if not isinstance(bindings, UnsetType) and bindings_of(bindings) != found.bindings:
            changes["bindings"] = bindings
        return self.change_group(topic, group, **changes) if changes else found


def _require_same(what: str, settings: Mapping[str, tuple[object, object]], remedy: str) -> None:
    """Refuses settings, each with what it is and what it should be, that differ; None should be anything."""
    differ = [
        f"{name} {have!r}, not {wanted!r}"
        for name, (have, wanted) in settings.items()
        if wanted is not None and have != wanted
    ]
    if differ:
        raise SettingsDiffer(f"{what} exists with other settings: {'; '.join(differ)}", remedy)
