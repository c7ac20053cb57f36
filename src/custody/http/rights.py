"""Who asks, and what they may do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
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
    rights: dict[Right, tuple[str, ...]] = field(default_factory=dict)

    def may(self, right: Right, topic: str | None) -> bool:
        """Whether it has the right on the topic; without a topic, on any at all."""
        if self.name is None:
            return True
        patterns = (*self.rights.get(right, ()), *self.rights.get("admin", ()))
        return bool(patterns) if topic is None else any(fnmatchcase(topic, pattern) for pattern in patterns)

    def require(self, right: Right, topics: Iterable[str]) -> None:
        """Refuses if the right is missing for one of the topics, or, without topics, altogether."""
        for topic in topics or (None,):
            if not self.may(right, topic):
                what = "any topic" if topic is None else f"topic {topic!r}"
                raise Forbidden(
                    f"the key {self.name!r} has no right to {right} on {what}",
                    f"Use another key, or make one with: custody apikeys create NAME --{right} {topic or '*'}",
                )


ANYBODY = Caller()
