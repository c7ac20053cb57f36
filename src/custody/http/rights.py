"""Who asks, and what they may do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from custody.errors import Forbidden

Right = Literal["produce", "consume", "admin"]


@dataclass(frozen=True, kw_only=True)
class Caller:
    """Whoever sends a request: the name of the key, and for each right the patterns of topics it holds for.

    Admin includes the others. Without a name nobody has to show a key here, and everything is allowed.
    """

    name: str | None = None
    produce: tuple[str, ...] = ()
    consume: tuple[str, ...] = ()
    admin: tuple[str, ...] = ()

    def may(self, right: Right, topic: str | None) -> bool:
        """Whether it has the right on the topic; without a topic, on any at all."""
        if self.name is None:
            return True
        patterns = self._patterns(right)
        return bool(patterns) if topic is None else any(fnmatchcase(topic, pattern) for pattern in patterns)

    def may_everywhere(self, right: Right) -> bool:
        """Whether it has the right on all topics, those of tomorrow too."""
        return self.name is None or "*" in self._patterns(right)

    def _patterns(self, right: Right) -> tuple[str, ...]:
        given: tuple[str, ...] = getattr(self, right)
        return given if right == "admin" else (*given, *self.admin)

    def require(self, right: Right, topics: Iterable[str]) -> None:
        """Refuses if the right is missing for one of the topics, or, without topics, altogether."""
        for topic in topics or (None,):
            if not self.may(right, topic):
                raise self._refusal(right, "any topic" if topic is None else f"topic {topic!r}", topic or "*")

    def require_everywhere(self, right: Right) -> None:
        """Refuses what concerns all topics if the right does not hold for all."""
        if not self.may_everywhere(right):
            raise self._refusal(right, "all topics", "'*'")

    def _refusal(self, right: Right, where: str, pattern: str) -> Forbidden:
        return Forbidden(
            f"the key {self.name!r} has no right to {right} on {where}",
            f"Use another key, or make one with: custody apikeys create NAME --{right} {pattern}",
        )


ANYBODY = Caller()
