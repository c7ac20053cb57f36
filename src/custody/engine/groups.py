"""Groups: their policy, pause and resume, and the position of a bare group."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, UnsetType

from custody.engine.base import Base
from custody.errors import InvalidArgument, InvalidPolicy
from custody.model.entities import Group, Message
from custody.model.policy import Policy
from custody.model.routing import Binding, bindings_of
from custody.model.start import start_columns
from custody.verbs import log
from custody.wire.answers import ChangedOut, DueOut
from custody.wire.fields import Batch, Help, NewName, Offset, Partition, Reason
from custody.wire.messages import MessageOut
from custody.wire.policies import GivenBindings, GivenPolicy, GivenSettings, GivenStart
from custody.wire.reports import GroupOut
from custody.wire.verb import composed, verb

GROUPS = "/topics/{topic}/groups"
GROUP = GROUPS + "/{group}"


class Groups(Base):
    """Groups of a topic."""

    @verb(
        "POST",
        GROUPS,
        tag="groups",
        right="admin",
        answer=GroupOut,
        status=201,
        repeat=True,
        names={"group": "name"},
        example={"name": "stock", "policy": {"ordering": "key", "max_attempts": 5}, "start": "earliest"},
    )
    def create_group(
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
        if bare and policy is not None:
            raise InvalidArgument("a bare group has no policy", "Leave out the policy, or bare.")
        how, offset, time = start_columns(start)
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

    @verb(
        "PATCH",
        GROUP,
        tag="groups",
        right="admin",
        answer=GroupOut,
        repeat=True,
        example={"policy": {"max_attempts": 10}},
    )
    def change_group(
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
        if policy is UNSET and bindings is UNSET:
            raise InvalidArgument("there is nothing to change", "Give policy or bindings.")
        with self._db.transaction() as connection:
            rows = partial(self._rows, on=connection)
            rows("lock_topic", topic=topic)
            row = rows("group_named", topic=topic, group=group)[0]
            if bindings is not UNSET:  # the order of locks wants cursors before the group's row
                rows("lock_cursors", group_id=row["group_id"])
            if policy is not UNSET:
                different = _different(describe_group(topic, row).policy, policy)
                text = msgspec.json.encode(different).decode()
                row = rows("update_group", topic=topic, group=group, policy=text)[0]
            if bindings is not UNSET:
                row = rows("bind", topic=topic, group=group, bindings=_bindings(bindings))[0]
        return describe_group(topic, row)

    @composed
    def update_group(self, topic: str, group: str, policy: Policy) -> Group:
        """Replaces the policy of a group, from now on. Its ordering cannot change."""
        return self.change_group(topic, group, policy=policy.plain())

    @composed
    def bind(self, topic: str, group: str, bindings: GivenBindings | None) -> Group:
        """Replaces all bindings of a group. Without bindings it gets every message.

        They apply to messages that the group has not reached yet, and after a `rewind` to older ones too.
        """
        return self.change_group(topic, group, bindings=bindings)

    @verb("DELETE", GROUP, tag="groups", right="admin", answer=None)
    def delete_group(self, topic: str, group: str) -> None:
        """Deletes a group and its state. The messages stay in the log."""
        # a client does not repeat it after a lost answer: somebody may have created a new group of that name since
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
        """Stops delivering messages to a group. Messages in flight can still be settled.

        False if the group was already paused.
        """
        return bool(self._value("pause", topic=topic, group=group, reason=reason))

    @verb("POST", GROUP + "/resume", tag="groups", right="admin", answer=ChangedOut)
    def resume(self, topic: str, group: str) -> bool:
        """Delivers messages to a paused group again, and closes an open circuit breaker.

        False if there was nothing to resume.
        """
        return bool(self._value("resume", topic=topic, group=group))

    @verb("GET", GROUP + "/due", tag="groups", right="consume", answer=DueOut)
    def next_due(self, topic: str, group: str) -> float | None:
        """Seconds until the group's next timed event: a retry, an expiring lease, or the next probe of an open circuit
        breaker. None if there is none, or while the group is paused.
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
            log.read(self._db, topic, partition, offset=None, max_messages=1)  # refuses a partition that does not exist
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
        # a client does not repeat it after a lost answer: the first request could arrive after a later commit and move
        # the position back
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


def _different(before: Policy | None, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The columns that these settings change."""
    try:
        after = Policy.from_mapping({**({} if before is None else before.plain()), **settings}).columns()
    except InvalidPolicy as error:
        raise InvalidPolicy(error.message, error.remedy, path="$.policy") from error
    known = {} if before is None else before.columns()
    return {name: value for name, value in after.items() if (name, value) not in known.items()}


def _policy(policy: Policy) -> str:
    return msgspec.json.encode(policy.columns()).decode()


def _bindings(given: Iterable[Binding | str] | None) -> str:
    return msgspec.json.encode([binding.plain() for binding in bindings_of(given)]).decode()
