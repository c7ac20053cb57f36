"""A pipeline: its source, its handler or frame, and its sinks. Define it, then run it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from threading import Event
from typing import TYPE_CHECKING, Any, Never, TypeVar, overload

from custody import extras
from custody.engine import Custody, Start
from custody.errors import InvalidArgument, PipelineRefused
from custody.handlers import require_callable, require_handler, require_run
from custody.model.policy import Duration, Policy
from custody.model.routing import Binding
from custody.spark import arguments
from custody.spark.batch_handlers import ROWS, BatchHandler, Form
from custody.spark.keyed import Ready
from custody.spark.outside.sinks import Files, Function, Outside
from custody.spark.settings import BATCH_TIME, GRACE, MAX_PER_BATCH, RunSettings
from custody.spark.tasks.state_type import StateType, forget, state_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from custody.spark.figures import Batch, PipelineSummary
    from custody.spark.outside.sinks import Writer
    from custody.spark.tasks.each import Handler
    from custody.spark.tasks.frame import Frame
    from custody.spark.tasks.states import KeyedHandler
    from custody.spark.tested import Tested
    from custody.spark.trial import Trial

H = TypeVar("H", bound="Handler")
K = TypeVar("K", bound="KeyedHandler")
R = TypeVar("R", bound="Ready")
D = TypeVar("D", bound="Frame")
W = TypeVar("W", bound="Writer")
B = TypeVar("B", bound=Callable[[Any], object])


ARGUMENTS = ("source", "group", "sink", "policy", "schema", "start", "bindings")


class Pipeline:
    """One streaming query over a group: every message ends done or dead, and its outputs are committed with it.

    `sink` is the topic for results, or several (the first is the default), or `Files`, `Jdbc`, `Delta` or `Iceberg`.
    Sinks outside of the database get the results of the first topic too. `schema` ("sku string, add int") gives typed
    fields; a message whose payload does not fit is dead. If there is no such group, it is created with the policy and
    the bindings; if there is, the given ones replace its own.
    """

    def __init__(
        self,
        *,
        source: str,
        group: str,
        sink: str | Outside | Sequence[str | Outside] | None = None,
        policy: Policy | None = None,
        schema: str | None = None,
        start: Start = "earliest",
        bindings: Iterable[Binding | str] | None = None,
        **unknown: Never,
    ) -> None:
        arguments.refuse_unknown(unknown, ARGUMENTS, "Pipeline")
        self.source, self.group = arguments.name_of(source, "source"), arguments.name_of(group, "group")
        self.policy, self.schema, self.start = (
            arguments.policy_of(policy),
            arguments.schema_of(schema),
            arguments.start_of(start),
        )
        self.bindings = arguments.bound_to(bindings)
        self.sinks, self.outside = arguments.sinks_of(sink)
        self.handler: Handler | None = None
        self.batch_handler: BatchHandler | None = None
        self.transform: Frame | None = None
        self.state: StateType | None = None
        """Of a keyed pipeline."""

    def __repr__(self) -> str:
        sinks = [*self.sinks, *(sink.name for sink in self.outside)]
        return f"<Pipeline {self.name} → {', '.join(sinks) or 'nothing'}>"

    @property
    def name(self) -> str:
        return f"{self.source}/{self.group}"

    def each(self, handler: H) -> H:
        """Decorates a handler of one message. It returns or yields payloads or `Outgoing`s, or None, and raises to
        fail.

        It runs in executors, in the order of the log for each key. Exceptions such as `custody.Dead` say more.
        """
        self._only_one()
        require_handler(handler, generators=True, coroutines=False)
        self.handler = handler
        return handler

    @overload
    def batch(self, function: B, /) -> B: ...

    @overload
    def batch(self, function: None = None, /, *, form: Form = "arrow", rows: int = ROWS) -> Callable[[B], B]: ...

    def batch(self, function: B | None = None, /, *, form: Form = "arrow", rows: int = ROWS) -> B | Callable[[B], B]:
        """Decorates a handler of many messages: a RecordBatch of at most so many `rows` in, one or a Table out; with
        `form="pandas"` DataFrames of pandas.

        The rows have the schema's columns and Custody's own, and so do those of the result, of which each keeps the
        `_partition` and `_offset` of its message. `fail` and `skip` mark rows. A call that raises is halved until the
        rows that break it are alone.
        """

        def add(handler: B) -> B:
            self._only_one()
            self.batch_handler = BatchHandler(function=handler, form=form, rows=rows)
            return handler

        return add if function is None else add(function)

    @overload
    def keyed(self, handler: R, /) -> R: ...

    @overload
    def keyed(self, handler: None = None, /, *, state: Any, ttl: Duration | None = None) -> Callable[[K], K]: ...

    def keyed(
        self, handler: R | None = None, /, *, state: Any = None, ttl: Duration | None = None
    ) -> R | Callable[[K], K]:
        """Decorates a handler of one message and the state of its key: as `each`, and `state.update(…)` counts if the
        message is done.

        `state` is a dataclass, a Struct or a schema ("total double"). A state that was not updated for `ttl` counts as
        absent. The group has to be ordered by key. `custody.spark.keyed` has handlers that are ready to use:
        `pipeline.keyed(dedup(by="id", within="1d"))`.
        """

        def register(function: K, kept: StateType) -> K:
            self._only_one()
            require_callable(function, "the handler", ("message", "state"))
            require_run(function, "the handler", generators=True)
            self.handler, self.state = function, kept
            return function

        if handler is None:
            kept = state_of(state, ttl)
            return lambda function: register(function, kept)
        given: object = handler
        if not isinstance(given, Ready) or state is not None or ttl is not None:
            raise InvalidArgument(
                "keyed needs the type of the state", "Write @pipeline.keyed(state=…), with a dataclass or a Struct."
            )
        return register(handler, state_of(handler.state, handler.ttl))

    def frame(self, transform: D) -> D:
        """Decorates a function from DataFrame to DataFrame: the schema's columns in, the payload's columns out.

        `_partition` and `_offset` have to stay, so that each row has a message. `fail_when` and `skip_when` mark rows.
        """
        self._only_one()
        require_callable(transform, "the frame", ("messages",))
        require_run(transform, "the frame")
        self.transform = transform
        return transform

    @overload
    def write(self, function: W, /) -> W: ...

    @overload
    def write(self, function: None = None, /, *, schema: str | None = None) -> Callable[[W], W]: ...

    def write(self, function: W | None = None, /, *, schema: str | None = None) -> W | Callable[[W], W]:
        """Decorates a sink: a function of a DataFrame and a `Write`, called in the driver before each commit.

        If a batch is run again, it is called again with the same claim number, so it can write each claim once. The
        rows are the same as for `Files`.
        """

        def add(sink: W) -> W:
            require_callable(sink, "the function of write", ("rows", "write"))
            require_run(sink, "the function of write")
            self.outside += (Function(sink, arguments.schema_of(schema)),)
            return sink

        return add if function is None else add(function)

    @property
    def function(self) -> Callable[..., object] | None:
        """What the pipeline runs, of whatever kind; None if it has not been given yet."""
        batched = None if self.batch_handler is None else self.batch_handler.function
        return self.handler or batched or self.transform

    def _only_one(self) -> None:
        if self.function is not None:
            raise InvalidArgument(
                f"{self!r} already has an `each`, a `batch`, a `keyed` or a `frame`",
                "A pipeline has one of them: define another pipeline.",
            )

    def require_complete(self) -> None:
        """Refuses a pipeline without a handler or frame, or whose function cannot be sent to executors."""
        if self.function is None:
            raise PipelineRefused(
                f"{self!r} has none of `each`, `batch`, `keyed` and `frame`",
                "Decorate a function with @pipeline.each, @pipeline.batch, @pipeline.keyed or @pipeline.frame.",
            )
        paths = [sink.path for sink in self.outside if isinstance(sink, Files)]
        if len({*paths}) < len(paths):
            raise PipelineRefused(f"{self!r} has two sinks with one directory", "Give each directory once.")
        names = [sink.name for sink in self.outside if sink.shows]
        if len({*names}) < len(names):
            raise PipelineRefused(f"{self!r} has two sinks with one name", "Give each table once.")
        if self.transform is not None and any(sink.schema is not None for sink in self.outside):
            raise PipelineRefused(
                f"{self!r} has a frame, and a schema for a sink",
                "Leave the sink's schema out: it is for `each` and `batch`.",
            )
        if self.transform is None:
            from custody.spark.tasks.each import require_portable

            if self.state is not None:
                arguments.require_order(self.policy, self.name)
                forget(self.state.kind)
            require_portable(self.function)

    def run(
        self,
        custody: Custody | str | None = None,
        *,
        spark: SparkSession | None = None,
        master: str | None = None,
        available_now: bool = False,
        drain: Duration | None = None,
        max_per_batch: int = MAX_PER_BATCH,
        batch_time: Duration = BATCH_TIME,
        grace: Duration = GRACE,
        checkpoint: str | None = None,
        pause_if_all_fail: bool = True,
        on_batch: Callable[[Batch], None] | None = None,
        on_trouble: Callable[[str], None] | None = None,
        stop: Event | None = None,
    ) -> PipelineSummary:
        """Runs until it is stopped (Ctrl-C, SIGTERM or `stop`); with `available_now` one pass over the messages due
        now.

        `drain` makes one pass that also waits for retries, up to that long. A batch has at most `max_per_batch`
        messages, and fewer if they would take longer than `batch_time`. A stop waits up to `grace` for the running
        batch, then cancels it. A failed query is started again. A newer driver of the same pipeline ends this one with
        `pipeline_fenced`. No checkpoint has to be kept. If every message fails alike from the start, the code is wrong:
        the group is paused, and no failure is counted (`pause_if_all_fail`).
        """
        with extras.named():
            from custody.spark.running import run

        settings = RunSettings(
            available_now=available_now,
            drain=drain,
            max_per_batch=max_per_batch,
            batch_time=batch_time,
            grace=grace,
            checkpoint=checkpoint,
            pause_if_all_fail=pause_if_all_fail,
            on_batch=on_batch,
            on_trouble=on_trouble,
            stop=stop or Event(),
        )
        return run([self], custody, settings, spark=spark, master=master)[0]

    def test(
        self,
        messages: Iterable[object],
        *,
        key: str | None = None,
        attempt: int = 1,
        last_error: str | None = None,
        states: Mapping[str, Any] | None = None,
    ) -> Tested:
        """Runs the handler on these messages, without Spark and without a database, for a test of yours.

        A message is a payload, an `Outgoing` (with a key, headers) or a `Message`; payloads get this `key`. `attempt`
        and `last_error` are those of a redelivery. Failures release the later messages of their key as in a pipeline.
        `states` are what a keyed handler finds stored, by key; `Tested.states` is what it leaves.
        """
        with extras.named():
            from custody.spark.tested import outcomes_of

        return outcomes_of(self, messages, key=key, attempt=attempt, last_error=last_error, states=states or {})

    def try_out(
        self,
        custody: Custody | str | None = None,
        *,
        limit: int = 20,
        spark: SparkSession | None = None,
        master: str | None = None,
    ) -> list[Trial]:
        """Runs the pipeline on the next messages of its group. Nothing is claimed, settled or published."""
        with extras.named():
            from custody.spark.trial import try_out

        return try_out(self, custody, limit=limit, spark=spark, master=master)
