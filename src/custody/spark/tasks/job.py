"""The job description that the driver sends to tasks, and the reports that tasks send back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple
from uuid import UUID

import pyarrow as pa

from custody.model.outcomes import Kind, Outcome
from custody.spark.database.tasks import TaskClaim
from custody.spark.tasks.state_type import StateType
from custody.verbs.pipelines import BatchReport, Sink, StagedCount, StagedStates
from custody.verbs.settle import storable

RESULT = (
    "what string, claim bigint, partition int, offset bigint, outcome string, error string, delay double, "
    "attempt bigint, topic_id int, messages bigint, of int, cause string, traceback string, name string"
)
KEEPING = f"{RESULT}, key string, payload string"
"""Columns of a report together with rows for sinks outside of the database."""
DATA, MADE_BY = "_data", "_made_by"
"""Columns of such rows: the key and payload, and the number of the attempt that made the row."""
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
        ("traceback", pa.string()),
        ("name", pa.string()),
    ]
)
_KEEPING = pa.schema([*_ARROW, ("key", pa.string()), ("payload", pa.string())])


@dataclass(frozen=True, kw_only=True)
class Job:
    """Sent in the closure of a task, so that its contents, above all the URL, appear in no plan and no log."""

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
    """`jsonValue()` of a StructType."""
    topic_uid: UUID | None = None
    """`topic_uid` of the messages."""
    priorities: bool = False
    """Whether the topic has priorities. The partition of a message determines its priority."""
    keeps: bool = False
    """Whether there are sinks outside. They get the outputs of the first topic, or all outputs without a topic."""
    retry: Literal["run", "refuse", "skip"] = "run"
    """What a second attempt of a frame's task does, which would fail like the first: `skip` reads nothing and reports
    that its messages were not run."""
    only: int | None = None
    """For a frame: the claim that the driver expects. References of another one are refused."""
    unproven: bool = False
    """No message was done since the start of the pipeline, so the code may be wrong."""
    state: StateType | None = None
    """Of a keyed pipeline."""
    careful: bool = False
    """An earlier run of the claim lost a Python worker: tasks record what they run from the start."""

    def claim(self, number: int) -> TaskClaim:
        """The claim with this number, for a task."""
        return TaskClaim(self.url, self.group_id, number)


class Report:
    """The report of one attempt of a task, as rows for the driver."""

    def __init__(self) -> None:
        self._rows: list[dict[str, Any]] = []

    def ran(self, claim: int, messages: int) -> None:
        """Reports how many messages succeeded."""
        self._rows.append({"what": "ran", "claim": claim, "messages": messages})

    def left(self, partition: int, offset: int) -> None:
        """Reports a message that was not run, because an earlier message of its key failed."""
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
                "traceback": storable(outcome.traceback),
            }
        )

    def placed(self, placed: Iterable[StagedCount]) -> None:
        self._rows += [{"what": "placed", **one._asdict()} for one in placed]

    def states(self, staged: StagedStates) -> None:
        self._rows.append(
            {
                "what": "states",
                "attempt": staged.attempt,
                "messages": staged.states,
                "offset": staged.changes,
                "delay": staged.ttl,
            }
        )

    def kept(self, attempt: int, rows: int) -> None:
        """Reports how many rows were made for sinks outside."""
        self._rows.append({"what": "kept", "attempt": attempt, "messages": rows})

    def unmet(self, counts: Mapping[str, int]) -> None:
        """Reports how many messages do not meet each expectation."""
        self._rows += [{"what": "unmet", "name": name, "messages": count} for name, count in sorted(counts.items())]

    def broken(self, task: int) -> None:
        """Reports that the first attempt of this task has failed, and that this one has run no messages."""
        self._rows.append({"what": "broken", "partition": task})

    def batch(self, *, keeps: bool = False) -> pa.RecordBatch:
        return pa.RecordBatch.from_pylist(self._rows, schema=_KEEPING if keeps else _ARROW)


def rows_batch(attempt: int, rows: Sequence[tuple[int, int, str | None, str]]) -> pa.RecordBatch:
    """Rows for sinks outside (partition, offset, key, payload), in the format of the report."""
    columns: dict[str, pa.Array] = {"what": pa.repeat("row", len(rows)), "attempt": pa.repeat(attempt, len(rows))}
    for number, name in enumerate(("partition", "offset", "key", "payload")):
        columns[name] = pa.array([row[number] for row in rows], _KEEPING.field(name).type)
    nothing = {name: pa.nulls(len(rows), kind) for name, kind in zip(_KEEPING.names, _KEEPING.types, strict=True)}
    return pa.RecordBatch.from_pydict({**nothing, **columns}, schema=_KEEPING)


class Gathered(NamedTuple):
    """The reports of all tasks: the number of the claim (None without rows), the outcomes, and the tasks whose messages
    were not run, because their first attempts have failed."""

    claim: int | None
    work: BatchReport
    broken: list[int]


def gather(table: pa.Table) -> Gathered:
    """Combines the reports of all tasks."""
    work = BatchReport()
    claim: int | None = None
    broken: list[int] = []
    for row in table.to_pylist():
        if row["what"] == "broken":
            broken.append(row["partition"])
        elif row["what"] == "ran":
            claim = row["claim"]
            work.ran += row["messages"]
        elif row["what"] == "left":
            work.left.setdefault(row["partition"], []).append(row["offset"])
        elif row["what"] == "placed":
            work.placed.append(
                StagedCount(row["attempt"], row["topic_id"], row["partition"], row["messages"], row["of"])
            )
        elif row["what"] == "states":
            work.states.append(StagedStates(row["attempt"], row["messages"], row["offset"], row["delay"]))
        elif row["what"] == "kept":
            work.kept[row["attempt"]] = work.kept.get(row["attempt"], 0) + row["messages"]
        elif row["what"] == "unmet":
            work.unmet[row["name"]] += row["messages"]
        else:
            kind: Kind = row["outcome"]
            if row["cause"] is not None:
                work.causes[row["partition"], row["offset"]] = row["cause"]
            # if several rows of a message failed, the first counts
            outcome = Outcome(kind, error=row["error"], delay=row["delay"], traceback=row["traceback"])
            work.failed.setdefault((row["partition"], row["offset"]), outcome)
    return Gathered(claim, work, broken)
