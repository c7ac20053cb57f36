"""Groups: their policy, pause and resume, and the position of a bare one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from custody.engine.base import Base
from custody.errors import InvalidArgument
from custody.model.bounds import require
from custody.model.entities import Group, Message
from custody.model.policy import Policy, require_zone
from custody.model.routing import Binding, bindings_of
from custody.verbs import log
from custody.wire.answers import ChangedOut, DueOut
from custody.wire.fields import Batch, Help, Offset, Partition, Reason
from custody.wire.messages import MessageOut
from custody.wire.reports import GroupOut
from custody.wire.verb import verb

GROUPS = "/topics/{topic}/groups"
GROUP = GROUPS + "/{group}"

Start = Literal["earliest", "latest"] | int | datetime
"""Where a new group starts: at the first message, after the last one, at an offset, or at a time."""


class Grouping(Base):
    """Groups of a topic."""

    def create_group(
        self,
        topic: str,
        group: str,
        policy: Policy | None = None,
        *,
        start: Start = "earliest",
        bare: bool = False,
        bindings: Iterable[Binding | str] | None = None,
    ) -> Group:
        """A new group. Without a policy it has the defaults; a bare one is only a cursor (`fetch`, `commit`).

        With bindings it gets the messages that one of them matches, and all others count as done for it.
        """
        if bare and policy is not None:
            raise InvalidArgument("a bare group has no policy")
        how, offset, time = _start(start)
        row = self._rows(
            "create_group",
            topic=topic,
            group=group,
            policy=_policy(policy or self._defaults),
            start=how,
            start_offset=offset,
            start_time=time,
            bare=bare,
            bindings=_bindings(bindings),
        )[0]
        return describe_group(topic, row)

    def update_group(self, topic: str, group: str, policy: Policy) -> Group:
        """Replaces the policy of a group, for everything that happens from now on. Its ordering stays."""
        return describe_group(topic, self._rows("update_group", topic=topic, group=group, policy=_policy(policy))[0])

    def bind(self, topic: str, group: str, bindings: Iterable[Binding | str] | None) -> Group:
        """Replaces all bindings of a group; without any it gets every message again.

        They hold for what the group has not come to yet, and after a `rewind` for the past too.
        """
        return describe_group(topic, self._rows("bind", topic=topic, group=group, bindings=_bindings(bindings))[0])

    def _change_group(
        self,
        topic: str,
        group: str,
        change: Callable[[Policy | None], Policy] | None,
        bindings: Iterable[Binding | str] | UnsetType | None,
    ) -> Group:
        """Changes fields of the policy, and replaces the bindings unless they are UNSET, in one transaction.

        Only what `change` makes different is written, under the lock of the group's row: others may change other fields
        at the same time.
        """
        with self._db.transaction() as connection:
            rows = partial(self._rows, on=connection)
            rows("lock_topic", topic=topic)
            row = rows("group_named", topic=topic, group=group)[0]
            if bindings is not UNSET:  # the cursors come before the group's row, by the order of locks
                rows("lock_cursors", group_id=row["group_id"])
            if change is not None:
                policy = describe_group(topic, row).policy
                before = {} if policy is None else policy.columns()
                after = change(policy).columns()
                different = {name: value for name, value in after.items() if (name, value) not in before.items()}
                text = msgspec.json.encode(different).decode()
                row = rows("update_group", topic=topic, group=group, policy=text)[0]
            if bindings is not UNSET:
                row = rows("bind", topic=topic, group=group, bindings=_bindings(bindings))[0]
        return describe_group(topic, row)

    @verb("DELETE", GROUP, tag="groups", right="admin", answer=None)
    def delete_group(self, topic: str, group: str) -> None:
        """Removes a group and all it knows."""
        # a client does not send it again after a lost answer: by then somebody may have made another one of that name
        self._rows("delete_group", topic=topic, group=group)

    @verb("GET", GROUPS, tag="groups", right="consume", answer=list[GroupOut])
    def groups(self, topic: str) -> list[Group]:
        """The groups of a topic."""
        topic_id = self._rows("topic_named", topic=topic)[0]["topic_id"]
        return [describe_group(topic, row) for row in self._db.select("groups", order=["name"], topic_id=topic_id)]

    @verb("GET", GROUP, tag="groups", right="consume", answer=GroupOut)
    def group(self, topic: str, group: str) -> Group:
        """One group with its policy."""
        return describe_group(topic, self._rows("group_named", topic=topic, group=group)[0])

    @verb(
        "POST",
        GROUP + "/pause",
        tag="groups",
        right="admin",
        answer=ChangedOut,
        example={"reason": "the shop is closed"},
    )
    def pause(self, topic: str, group: str, *, reason: Reason = None) -> bool:
        """Stops handing out messages; what is in flight can be settled. False if it was paused already."""
        return bool(self._value("pause", topic=topic, group=group, reason=reason))

    @verb("POST", GROUP + "/resume", tag="groups", right="admin", answer=ChangedOut)
    def resume(self, topic: str, group: str) -> bool:
        """Goes on after a pause, and closes an open circuit breaker. False if there was nothing to resume."""
        return bool(self._value("resume", topic=topic, group=group))

    @verb("GET", GROUP + "/due", tag="groups", right="consume", answer=DueOut)
    def next_due(self, topic: str, group: str) -> float | None:
        """Seconds until something of the group is due by itself: a retry, an expiring lease, or, while the circuit
        breaker is open, its next probe. None if nothing is, or while the group is paused.
        """
        due: float | None = self._value("next_due", topic=topic, group=group)
        return due

    @verb(
        "GET",
        GROUP + "/fetch",
        tag="groups",
        right="consume",
        answer=list[MessageOut],
        names={"max_messages": "max"},
    )
    def fetch(
        self,
        topic: str,
        group: str,
        partition: Annotated[Partition, Help("The partition to read.")] = 0,
        *,
        max_messages: Batch = 100,
    ) -> list[Message]:
        """For a bare group: the messages after its committed position. Nothing is recorded until `commit`."""
        positions = {row["partition"]: row["next_offset"] for row in self._rows("positions", topic=topic, group=group)}
        if partition not in positions:
            log.read(self._db, topic, partition, offset=None, max_messages=1)  # refuses a partition that is not there
        return log.read(
            self._db,
            topic,
            partition,
            offset=positions[partition],
            max_messages=max_messages,
            max_bytes=self._max_bytes,
            decoding=self._decoding,
        )

    @verb(
        "POST",
        GROUP + "/commit",
        tag="groups",
        right="consume",
        answer=None,
        operation="commit_position",
        example={"partition": 0, "next_offset": 7},
    )
    def commit(self, topic: str, group: str, partition: Partition, next_offset: Offset) -> None:
        """For a bare group: everything below `next_offset` is done."""
        # a client does not send it again after a lost answer: the first one could still arrive, after a later commit,
        # and set it back
        self._rows("commit_position", topic=topic, group=group, partition=partition, offset=next_offset)


def describe_group(topic: str, row: Mapping[str, Any]) -> Group:
    return Group(
        topic=topic,
        name=row["name"],
        bare=row["bare"],
        policy=None if row["bare"] else Policy.from_columns(row),
        paused_at=row["paused_at"],
        paused_reason=row["paused_reason"],
        created_at=row["created_at"],
        bindings=tuple(Binding(one.get("pattern"), headers=one.get("headers")) for one in row["bindings"] or ()),
    )


def _policy(policy: Policy) -> str:
    return msgspec.json.encode(policy.columns()).decode()


def _bindings(given: Iterable[Binding | str] | None) -> str:
    return msgspec.json.encode([binding.plain() for binding in bindings_of(given)]).decode()


def require_start(start: Start) -> None:
    """Refuses what names no place to start at."""
    if isinstance(start, datetime):
        require_zone(start)
    elif isinstance(start, int) and not isinstance(start, bool):
        require("start", start)
    elif start not in ("earliest", "latest"):
        raise InvalidArgument(f"start cannot be {start!r}", "Start at earliest, latest, an offset or a time.")


def _start(start: Start) -> tuple[str, int | None, datetime | None]:
    require_start(start)
    if isinstance(start, datetime):
        return "time", None, start
    return (start, None, None) if isinstance(start, str) else ("offset", start, None)
