"""Topics over HTTP: the creation, which needs a check after an unknown outcome, and changes of cached layouts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from custody.engine import Custody
from custody.errors import TopicExists
from custody.model.entities import Topic
from custody.model.lanes import LANES
from custody.remote.base import RemoteBase
from custody.remote.derived import request, special
from custody.remote.transport import Tries
from custody.wire.verb import Verb


class RemoteTopics(RemoteBase):
    """Topics, and the retention of the log."""

    @special(Custody.create_topic)
    def create_topic(self, verb: Verb, given: dict[str, Any]) -> Topic:
        tries = Tries()
        try:
            made: Topic = request(self, verb, given, tries)
        except TopicExists:
            if not tries.unknown:
                raise
            made = self.topic(given["name"])  # an earlier attempt may have created it
            if not _as_asked(made, given):
                raise
        self._layouts.pop(given["name"], None)
        return made

    @special(Custody.delete_topic)
    def delete_topic(self, verb: Verb, given: dict[str, Any]) -> None:
        try:
            request(self, verb, given)
        finally:
            self._layouts.pop(given["name"], None)

    @special(Custody.change_topic)
    def change_topic(self, verb: Verb, given: dict[str, Any]) -> Topic:
        changed: Topic = request(self, verb, given)
        self._layouts.pop(given["topic"], None)
        return changed


def _as_asked(made: Topic, given: Mapping[str, Any]) -> bool:
    """Whether a topic has the requested settings. The value of starvation_limit is not compared: it has a default."""
    partitions = given["partitions"] * LANES if given["priorities"] else given["partitions"]
    asked = partitions, given["max_depth"], given["priorities"]
    kept, wanted = made.retention, given["retention"]
    return (made.partitions, made.max_depth, made.priorities) == asked and (
        kept is None if wanted is None else wanted.holds_in(kept)
    )
