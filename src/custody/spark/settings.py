"""Settings of a run: endless or one pass, size of batches, callbacks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from threading import Event
from typing import TYPE_CHECKING, TypeVar

from custody.errors import InvalidArgument
from custody.model.bounds import require
from custody.model.policy import Duration, seconds, seconds_or_none
from custody.vitals import Vitals

if TYPE_CHECKING:
    from custody.spark.figures import Batch

logger = logging.getLogger(__name__)
T = TypeVar("T")

MAX_PER_BATCH = 100_000
BATCH_TIME: Duration = "10s"
GRACE: Duration = "20s"
"""Less than the 30 s that Kubernetes gives a container, because Spark needs some of them to shut down."""


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Settings for all pipelines of a run. `Pipeline.run` explains them."""

    available_now: bool = False
    drain: Duration | None = None
    max_per_batch: int = MAX_PER_BATCH
    batch_time: Duration = BATCH_TIME
    grace: Duration = GRACE
    checkpoint: str | None = None
    pause_if_all_fail: bool = True
    on_batch: Callable[[Batch], None] | None = None
    on_trouble: Callable[[str], None] | None = None
    stop: Event = field(default_factory=Event)
    vitals: Mapping[str, Vitals] = field(default_factory=dict)
    """By the name of the pipeline: where it shows its signs of life, for monitoring."""

    def __post_init__(self) -> None:
        require("max_per_batch", self.max_per_batch)
        for name in ("on_batch", "on_trouble"):
            if getattr(self, name) is not None and not callable(getattr(self, name)):
                raise InvalidArgument(
                    f"{name} must be a function, not a {type(getattr(self, name)).__name__}",
                    "Give a function, or leave it out.",
                )
        if self.batch_seconds <= 0:
            raise InvalidArgument(
                f"batch_time is {self.batch_time!r} and must be more than 0", 'For example batch_time="10s".'
            )
        if self.grace_seconds < 0:
            raise InvalidArgument(f"grace is {self.grace!r} and cannot be negative", 'For example grace="20s".')
        _ = self.drain_seconds  # refuses what is not a duration before anything is started

    def tell(self, listener: Callable[[T], None] | None, what: T) -> None:
        """Calls `on_batch` or `on_trouble`. An exception is logged, because a listener must not end the run."""
        try:
            if listener is not None:
                listener(what)
        except Exception:
            logger.exception("%s raised", "on_batch" if listener is self.on_batch else "on_trouble")

    @property
    def one_pass(self) -> bool:
        return self.available_now or self.drain is not None

    @property
    def drain_seconds(self) -> float | None:
        """How long a pass waits for retries; None if not at all."""
        return seconds_or_none(self.drain)

    @property
    def grace_seconds(self) -> float:
        """How long a stop waits for the running batch."""
        return seconds(self.grace)

    @property
    def batch_seconds(self) -> float:
        return seconds(self.batch_time)
