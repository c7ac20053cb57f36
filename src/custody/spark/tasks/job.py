"""What the driver tells every task of a pipeline, and what the tasks tell the driver."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import pyarrow as pa

from custody.model.outcomes import Kind, Outcome
from custody.spark.database.tasks import TaskClaim
from custody.verbs.pipelines import Placed, Sink, Work
from custody.verbs.settle import storable

RESULT = (
    "what string, claim bigint, partition int, offset bigint, outcome string, error string, delay double, "
    "attempt bigint, topic_id int, messages bigint, of int, cause string"
)
KEEPING = f"{RESULT}, key string, payload string"
"""A report that has rows for sinks outside of the database beside it."""
DATA, MADE_BY = "_data", "_made_by"
"""Columns of such rows: what is written outside, and the number of the attempt that made it."""
_ARROW = pa.schema(
    [
        ("what", pa.string()),
        ("claim", pa.int64()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("outcome", pa.string()),
        ("error", pa.string()),
        ("delay", pa.float64()),
        ("attempt", pa.int64()),
        ("topic_id", pa.int32()),
        ("messages", pa.int64()),
        ("of", pa.int32()),
        ("cause", pa.string()),
    ]
)
_KEEPING = pa.schema([*_ARROW, ("key", pa.string()), ("payload", pa.string())])


@dataclass(frozen=True, kw_only=True)
class Job:
    """It travels in the closure of a task: what is in it, the URL above all, stands in no plan and no log."""

    url: str
    topic: str
    group: str
    group_id: int
    ordered: bool
    on_dead: str
    handler_timeout: float | None
    sinks: Mapping[str, Sink]
    """The topics that may be written to; the first is the default."""
    schema: Mapping[str, Any] | None
    """The value of a StructType."""
    topic_uid: UUID | None = None
    """Of the topic, which a message carries."""
    priorities: bool = False
    """The topic has them: the partition of a message says which one it has."""
    keeps: bool = False
    """What goes to the first sink goes outside of the database too; without any topic, everything."""
    once: bool = False
    """A frame over many messages: a task that failed is not tried again, for what broke it would break it again."""
    careful: bool = False
    """An earlier run of the claim lost a Python worker: tasks note what they run from the start."""

    def claim(self, number: int) -> TaskClaim:
        """A claim of the group, for the task that works on it."""
        return TaskClaim(self.url, self.group_id, number)


class Report:
    """What one attempt of a task has to say, as rows for the driver."""

    def __init__(self) -> None:
        self._rows: list[dict[str, Any]] = []

    def ran(self, claim: int, messages: int) -> None:
        """So many messages went well."""
        self._rows.append({"what": "ran", "claim": claim, "messages": messages})

    def left(self, partition: int, offset: int) -> None:
        """Not run, because an earlier message of its key did not go well."""
        self._rows.append({"what": "left", "partition": partition, "offset": offset})

    def failed(
        self, partition: int, offset: int, outcome: Outcome, delay: float | None, cause: str | None = None
    ) -> None:
        self._rows.append(
            {
                "what": "failed",
                "partition": partition,
                "offset": offset,
                "outcome": outcome.kind,
                "error": storable(outcome.error),
                "delay": delay,
                "cause": cause,
            }
        )

    def placed(self, placed: Iterable[Placed]) -> None:
        self._rows += [{"what": "placed", **one._asdict()} for one in placed]

    def kept(self, attempt: int, rows: int) -> None:
        """So many rows were made for sinks outside."""
        self._rows.append({"what": "kept", "attempt": attempt, "messages": rows})

    def batch(self, *, keeps: bool = False) -> pa.RecordBatch:
        return pa.RecordBatch.from_pylist(self._rows, schema=_KEEPING if keeps else _ARROW)


def rows_batch(attempt: int, rows: Sequence[tuple[int, int, str | None, str]]) -> pa.RecordBatch:
    """Rows for sinks outside (partition, offset, key, payload), beside the report of the attempt that made them."""
    columns: dict[str, pa.Array] = {"what": pa.repeat("row", len(rows)), "attempt": pa.repeat(attempt, len(rows))}
    for number, name in enumerate(("partition", "offset", "key", "payload")):
        columns[name] = pa.array([row[number] for row in rows], _KEEPING.field(name).type)
    nothing = {name: pa.nulls(len(rows), kind) for name, kind in zip(_KEEPING.names, _KEEPING.types, strict=True)}
    return pa.RecordBatch.from_pydict({**nothing, **columns}, schema=_KEEPING)


def gather(table: pa.Table) -> tuple[int | None, Work]:
    """What all tasks of a batch said: the number of the claim (None if it had no rows), and the work."""
    work = Work()
    claim: int | None = None
    for row in table.to_pylist():
        if row["what"] == "ran":
            claim = row["claim"]
            work.ran += row["messages"]
        elif row["what"] == "left":
            work.left.setdefault(row["partition"], []).append(row["offset"])
        elif row["what"] == "placed":
            work.placed.append(Placed(row["attempt"], row["topic_id"], row["partition"], row["messages"], row["of"]))
        elif row["what"] == "kept":
            work.kept[row["attempt"]] = work.kept.get(row["attempt"], 0) + row["messages"]
        else:
            kind: Kind = row["outcome"]
            if row["cause"] is not None:
                work.causes[row["partition"], row["offset"]] = row["cause"]
            # of several rows of one message the first that failed counts
            work.failed.setdefault(
                (row["partition"], row["offset"]), Outcome(kind, error=row["error"], delay=row["delay"])
            )
    return claim, work
