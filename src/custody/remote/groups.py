"""Groups over HTTP: the creation, which needs a check after an unknown outcome."""

from __future__ import annotations

from typing import Any

from custody.engine import Custody
from custody.errors import GroupExists, InvalidArgument
from custody.model.entities import Group
from custody.model.policy import Policy
from custody.model.routing import bindings_of
from custody.remote.base import RemoteBase
from custody.remote.derived import request, special
from custody.remote.transport import Tries
from custody.wire.verb import Verb


class RemoteGroups(RemoteBase):
    """Groups of a topic."""

    @special(Custody.create_group)
    def create_group(self, verb: Verb, given: dict[str, Any]) -> Group:
        """Without a policy it has this client's defaults, or else those of the server."""
        policy, bare = given["policy"], given["bare"]
        if bare and policy is not None:
            raise InvalidArgument("a bare group has no policy", "Leave out the policy, or bare.")
        if policy is None and not bare and self._defaults != Policy():
            policy = given["policy"] = self._defaults
        tries = Tries()
        try:
            made: Group = request(self, verb, given, tries)
        except GroupExists:
            if not tries.unknown:
                raise
            made = self.group(given["topic"], given["group"])  # an earlier attempt may have created it
            same = made.bare == bare and made.bindings == bindings_of(given["bindings"])
            if not same or policy not in (None, made.policy):
                raise
        return made
