"""Taking a figure several times, in turn with what it is compared to, so that noise hits both."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter


@dataclass(frozen=True)
class Samples:
    """The values of one figure, in the order taken."""

    values: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return median(self.values)

    def percentile(self, share: float) -> float:
        ordered = sorted(self.values)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def in_turn(repetitions: int, contenders: Mapping[str, Callable[[], float]]) -> dict[str, Samples]:
    """Each contender once for each repetition, in an order that is reversed every other time."""
    samples = {name: Samples() for name in contenders}
    for repetition in range(repetitions):
        names = list(contenders)
        for name in names if repetition % 2 == 0 else reversed(names):
            samples[name].values.append(contenders[name]())
    return samples


def ratio(samples: Samples, limit: Samples) -> float:
    """The median of the ratios of neighbours in time: what slows both for a while falls out."""
    return median(a / b for a, b in zip(samples.values, limit.values, strict=True))


def repeat(times: int, work: Callable[[], object]) -> None:
    for _ in range(times):
        work()


def timed(work: Callable[[], object]) -> float:
    """Seconds that the work takes, with the collector's debts of earlier work paid before."""
    gc.collect()
    start = perf_counter()
    work()
    return perf_counter() - start


def rate(messages: int, work: Callable[[], object]) -> float:
    """Messages a second."""
    return messages / timed(work)
