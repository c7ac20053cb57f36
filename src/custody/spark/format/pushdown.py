"""Filter pushdown: Spark's filters as bounds and conditions for the database. Runs on the driver, during planning."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from pyspark.sql.datasource import (
    DataSourceReader,
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    IsNull,
    LessThan,
    LessThanOrEqual,
)

from custody.spark.database.arrow import Condition

_MICROSECOND = timedelta(microseconds=1)
_NEVER_NULL = ("topic", "partition", "offset", "published_at")


@dataclass(kw_only=True)
class Pushdown:
    """What is left to read. Pushed filters are exact, so Spark need not apply them again.

    A time becomes an offset, because `published_at` never decreases within a partition. Both sides have microseconds.
    """

    topic: str
    nothing: bool = False
    partitions: set[int] | None = None
    low: int = 0
    high: int | None = None
    since: datetime | None = None
    before: datetime | None = None
    conditions: list[Condition] = field(default_factory=list)

    def take(self, wanted: Filter) -> bool:
        """Pushes a filter down; False if Spark has to apply it."""
        match wanted:
            case IsNotNull(attribute=(name,)) if name in _NEVER_NULL:
                return True
            case IsNotNull(attribute=("key",)):
                self.conditions.append(("key", "is not null", None))
                return True
            case IsNull(attribute=("key",)):
                self.conditions.append(("key", "is null", None))
                return True
            case EqualTo(attribute=(name,), value=value) | EqualNullSafe(attribute=(name,), value=value):
                return value is not None and self._among(name, [value])
            case In(attribute=(name,), value=values):
                return self._among(name, [value for value in values if value is not None])
            case GreaterThanOrEqual(attribute=(name,), value=value):
                return self._from(name, value)
            case LessThan(attribute=(name,), value=value):
                return self._until(name, value)
            case GreaterThan(attribute=(name,), value=value):
                return self._from(name, _next(value))
            case LessThanOrEqual(attribute=(name,), value=value):
                return self._until(name, _next(value))
        return False

    def _among(self, name: str, values: list[Any]) -> bool:
        if name == "topic":
            self.nothing |= self.topic not in values
        elif name == "partition":
            self.partitions = set(values) if self.partitions is None else self.partitions & set(values)
        elif name == "offset" and values:
            self._from(name, min(values))
            self._until(name, max(values) + 1)
            if len(values) > 1:
                self.conditions.append(("offset", "in", values))
        elif name == "key" and not any("\0" in value for value in values):  # PostgreSQL's text cannot contain NUL
            self.conditions.append(("key", "in", values) if len(values) != 1 else ("key", "=", values[0]))
        elif name == "published_at" and len(values) == 1:
            return self._from(name, values[0]) and self._until(name, _next(values[0]))
        else:
            return False
        return True

    def _from(self, name: str, value: Any) -> bool:
        if name == "offset" and isinstance(value, int):
            self.low = max(self.low, value)
        elif name == "published_at" and isinstance(value, datetime):
            self.since = value if self.since is None else max(self.since, value)
        elif name == "partition" and isinstance(value, int):
            self._keep(lambda partition: partition >= value)
        else:
            return False
        return True

    def _until(self, name: str, value: Any) -> bool:
        if name == "offset" and isinstance(value, int):
            self.high = value if self.high is None else min(self.high, value)
        elif name == "published_at" and isinstance(value, datetime):
            self.before = value if self.before is None else min(self.before, value)
        elif name == "partition" and isinstance(value, int):
            self._keep(lambda partition: partition < value)
        else:
            return False
        return True

    def _keep(self, wanted: Callable[[int], bool]) -> None:
        every = range(4096) if self.partitions is None else self.partitions  # as many as a topic can have
        self.partitions = set(filter(wanted, every))


def _next(value: Any) -> Any:
    """The smallest value above this one; None, which is not pushed down, if there is none."""
    try:
        return value + _MICROSECOND if isinstance(value, datetime) else value + 1
    except (TypeError, OverflowError):
        return None


class OptionalPush:
    """`pushFilters` of a reader that also works where filter pushdown for Python is off, which is Spark's default.

    There Spark refuses every reader that overrides `pushFilters` instead of filtering itself. It detects the override
    by the function behind the method, so this object names the inherited one.
    """

    __func__ = staticmethod(DataSourceReader.pushFilters)

    def __init__(self, pushdown: Pushdown) -> None:
        self._pushdown = pushdown

    def __call__(self, filters: list[Filter]) -> Iterable[Filter]:
        return [wanted for wanted in filters if not self._pushdown.take(wanted)]
