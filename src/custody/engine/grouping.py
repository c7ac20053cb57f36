"""Groups: their policy, pause and resume, and the position of a bare one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from custody import insights, log
from custody.bounds import require
from custody.engine.base import Base
from custody.errors import InvalidArgument
from custody.model import Group, Message
from custody.policy import Policy, require_zone
from custody.routing import Binding, bindings_of

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
        row = self._db.call_dicts(
            "create_group",
            topic=topic,
            group=group,
            policy=_policy(policy or self._defaults),
            start=how,
            start_offset=offset,
            start_time=time,
            bare=bare,
            bindings=_bindings(bindings),
            now=self._now(),
        )[0]
        return insights.describe_group(topic, row)

    def update_group(self, topic: str, group: str, policy: Policy) -> Group:
        """Replaces the policy of a group, for everything that happens from now on. Its ordering stays."""
        row = self._db.call_dicts(
            "update_group", topic=topic, group=group, policy=_policy(policy), actor=self.worker, now=self._now()
        )[0]
        return insights.describe_group(topic, row)

    def bind(self, topic: str, group: str, bindings: Iterable[Binding | str] | None) -> Group:
        """Replaces all bindings of a group; without any it gets every message again.

        They hold for what the group has not come to yet, and after a `rewind` for the past too.
        """
        row = self._db.call_dicts(
            "bind", topic=topic, group=group, bindings=_bindings(bindings), actor=self.worker, now=self._now()
        )[0]
        return insights.describe_group(topic, row)

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
        given = {"topic": topic, "group": group}
        by = {**given, "actor": self.worker, "now": self._now()}
        with self._db.transaction() as connection:
            self._db.call("lock_topic", on=connection, topic=topic)
            row = self._db.call_dicts("group_named", on=connection, **given)[0]
            if bindings is not UNSET:  # the cursors come before the group's row, by the order of locks
                self._db.call("lock_cursors", on=connection, group_id=row["group_id"])
            if change is not None:
                policy = insights.describe_group(topic, row).policy
                before = {} if policy is None else policy.columns()
                after = change(policy).columns()
                different = {name: value for name, value in after.items() if (name, value) not in before.items()}
                text = msgspec.json.encode(different).decode()
                row = self._db.call_dicts("update_group", on=connection, policy=text, **by)[0]
            if bindings is not UNSET:
                row = self._db.call_dicts("bind", on=connection, bindings=_bindings(bindings), **by)[0]
        return insights.describe_group(topic, row)

    def delete_group(self, topic: str, group: str) -> None:
        self._db.call("delete_group", topic=topic, group=group)

    def groups(self, topic: str) -> list[Group]:
        return insights.groups(self._db, topic)

    def group(self, topic: str, group: str) -> Group:
        return insights.describe_group(topic, self._db.call_dicts("group_named", topic=topic, group=group)[0])

    def pause(self, topic: str, group: str, *, reason: str | None = None) -> bool:
        """Stops handing out messages; what is in flight can be settled. False if it was paused already."""
        return bool(
            self._db.call("pause", topic=topic, group=group, reason=reason, actor=self.worker, now=self._now())[0][0]
        )

    def resume(self, topic: str, group: str) -> bool:
        """Goes on after a pause, and closes an open circuit breaker. False if there was nothing to resume."""
        return bool(self._db.call("resume", topic=topic, group=group, actor=self.worker, now=self._now())[0][0])

    def fetch(self, topic: str, group: str, partition: int = 0, *, max_messages: int = 100) -> list[Message]:
        """For a bare group: the messages after its committed position. Nothing is recorded until `commit`."""
        positions: dict[int, int] = dict(self._db.call("positions", topic=topic, group=group, now=self._now()))
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

    def commit(self, topic: str, group: str, partition: int, next_offset: int) -> None:
        """For a bare group: everything below `next_offset` is done."""
        self._db.call(
            "commit_position",
            topic=topic,
            group=group,
            partition=partition,
            offset=next_offset,
            worker=self.worker,
            now=self._now(),
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
