"""The caller of a request, and its rights."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from custody.errors import Forbidden

Right = Literal["produce", "consume", "admin"]


@dataclass(frozen=True, kw_only=True)
class Caller:
    """The sender of a request: the name of its key, and for each right the patterns of topics.

    Admin includes the others. Without a name the server needs no keys, and everything is allowed.
    """

    name: str | None = None
    produce: tuple[str, ...] = ()
    consume: tuple[str, ...] = ()
    admin: tuple[str, ...] = ()

    def may(self, right: Right, topic: str | None) -> bool:
        """Whether it has the right on the topic; without a topic, on any topic at all."""
        if self.name is None:
            return True
        patterns = self._patterns(right)
        return bool(patterns) if topic is None else any(fnmatchcase(topic, pattern) for pattern in patterns)

    def may_everywhere(self, right: Right) -> bool:
        """Whether it has the right on all topics, including future ones."""
        return self.name is None or "*" in self._patterns(right)

    def _patterns(self, right: Right) -> tuple[str, ...]:
        given: tuple[str, ...] = getattr(self, right)
        return given if right == "admin" else (*given, *self.admin)

    def require(self, right: Right, topics: Iterable[str]) -> None:
        """Refuses if the right is missing for one of the topics; without topics, if it is missing for all."""
        for topic in topics or (None,):
            if not self.may(right, topic):
                raise self._refusal(right, "any topic" if topic is None else f"topic {topic!r}", topic or "*")

    def require_everywhere(self, right: Right) -> None:
        """Refuses if the right does not hold for all topics."""
        if not self.may_everywhere(right):
            raise self._refusal(right, "all topics", "'*'")

    def _refusal(self, right: Right, where: str, pattern: str) -> Forbidden:
        return Forbidden(
            f"the key {self.name!r} has no right to {right} on {where}",
            f"Use another key, or make one with: custody apikeys create NAME --{right} {pattern}",
        )


ANYBODY = Caller()
