"""Figures of a pipeline: a batch, a run, and the state of its group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from custody.engine import Custody
from custody.model.outcomes import Counts
from custody.verbs.pipelines import Committed


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One committed claim: the outcomes of its messages, and the time since the start of its job."""

    pipeline: str
    claim: int
    committed: Committed
    took: float
    unmet: Mapping[str, int] = field(default_factory=dict)
    """How many messages do not meet each expectation that some do not meet."""

    @property
    def rate(self) -> float:
        return self.committed.messages / self.took if self.took else 0.0


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """Messages of a group that are not done: never delivered, waiting for a retry, parked behind their key, dead.

    If the group is `bound`, `lag` includes messages that were not matched with its bindings yet.
    """

    lag: int
    bound: bool
    waiting: int
    parked: int
    dead: int
    blocked_keys: int
    next_due: float | None


@dataclass(frozen=True, kw_only=True)
class PipelineSummary(Counts):
    """What a pipeline did in this run, and what still waits."""

    pipeline: str
    batches: int
    messages: int
    outputs: int
    restarts: int
    seconds: float
    left: Outlook
    unmet: Mapping[str, int] = field(default_factory=dict)
    """How many messages did not meet each expectation; one that is retried counts each time."""
    error: str | None = None
    """The error with which it failed, if it did."""


def outlook(c: Custody, topic: str, group: str) -> Outlook:
    """The messages of a group that are not done now."""
    figures = c.figures(topic, group)
    return Outlook(
        lag=figures.lag,
        bound=figures.bound,
        waiting=figures.waiting,
        parked=figures.parked,
        dead=figures.dead,
        blocked_keys=figures.blocked_keys,
        next_due=c.next_due(topic, group),
    )
