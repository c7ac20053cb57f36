"""Groups over HTTP."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from custody.engine.grouping import Start, require_start
from custody.errors import GroupExists, InvalidArgument
from custody.model.entities import Group
from custody.model.policy import Policy
from custody.model.routing import Binding, bindings_of
from custody.remote.base import RemoteBase, group_path, topic_path
from custody.remote.transport import Tries
from custody.wire.fields import LARGEST
from custody.wire.policies import BindingIn, GroupIn, GroupPatch, PolicyIn
from custody.wire.reports import GroupOut


class RemoteGrouping(RemoteBase):
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
        """As the direct connection. Without a policy it has this client's defaults, or else those of the server."""
        if bare and policy is not None:
            raise InvalidArgument("a bare group has no policy")
        if policy is None and not bare and self._defaults != Policy():
            policy = self._defaults
        require_start(start)
        if isinstance(start, int):
            self._require_offset(topic_path(topic), start)
            start = min(start, LARGEST)
        bound = bindings_of(bindings)
        body = GroupIn(
            name=group,
            policy=None if policy is None else PolicyIn.of(policy),
            start=msgspec.to_builtins(start),
            bare=bare,
            bindings=[BindingIn.of(one) for one in bound],
        )
        tries = Tries()
        try:
            return self._call(
                "POST", topic_path(topic) + "/groups", GroupOut, body=body, repeat=True, tries=tries
            ).value()
        except GroupExists:
            if tries.unknown:  # an attempt of ours may have made it
                made = self.group(topic, group)
                asked = policy is None or made.policy == policy
                if asked and (made.bare, made.bindings) == (bare, bound):
                    return made
            raise

    def update_group(self, topic: str, group: str, policy: Policy) -> Group:
        return self._changed(topic, group, GroupPatch(policy=PolicyIn.of(policy)))

    def bind(self, topic: str, group: str, bindings: Iterable[Binding | str] | None) -> Group:
        given = [BindingIn.of(one) for one in bindings_of(bindings)]
        return self._changed(topic, group, GroupPatch(bindings=[*given]))

    def _changed(self, topic: str, group: str, body: GroupPatch) -> Group:
        return self._call("PATCH", group_path(topic, group), GroupOut, body=body, repeat=True).value()
