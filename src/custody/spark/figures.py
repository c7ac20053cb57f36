"""What a pipeline says of itself: a batch, a whole run, and what still waits."""

from __future__ import annotations

from dataclasses import dataclass

from custody.engine import Custody
from custody.verbs.pipelines import Committed


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One committed claim: what its messages came to, and how long it took from the start of its job."""

    pipeline: str
    claim: int
    committed: Committed
    took: float

    @property
    def rate(self) -> float:
        return self.committed.messages / self.took if self.took else 0.0


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """What a group still has: never handed out, to be retried, behind their key, dead; and how many blocked keys. Of a
    group that is `bound`, lag includes what it has not looked at yet, bound to it or not."""

    lag: int
    bound: bool
    waiting: int
    parked: int
    dead: int
    blocked_keys: int
    next_due: float | None


@dataclass(frozen=True, kw_only=True)
class PipelineSummary:
    """What a pipeline did in this run, and what still waits."""

    pipeline: str
    batches: int
    messages: int
    done: int
    failed: int
    dead: int
    later: int
    released: int
    lost: int
    outputs: int
    restarts: int
    seconds: float
    left: Outlook
    error: str | None = None
    """What it failed of, if it did."""


def outlook(c: Custody, topic: str, group: str) -> Outlook:
    """What waits for the pipeline of a group now."""
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
