"""Running pipelines: side by side in one Spark session, until they are stopped or a pass is over."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from pyspark.sql import SparkSession

import custody as api
from custody.engine import Custody
from custody.errors import GroupNotFound, InvalidArgument
from custody.policy import Duration, seconds, seconds_or_none
from custody.spark.driving import Driving
from custody.spark.figures import Batch, Summary
from custody.spark.given import require_fit
from custody.spark.pipeline import BATCH_TIME, MAX_PER_BATCH, Pipeline
from custody.spark.probe import require_able
from custody.spark.session import session
from custody.spark.shipping import ship
from custody.worker.signals import stopped_by_signals


def run(
    pipelines: Sequence[Pipeline],
    database: Custody | str | None = None,
    *,
    spark: SparkSession | None = None,
    master: str | None = None,
    available_now: bool = False,
    drain: Duration | None = None,
    max_per_batch: int = MAX_PER_BATCH,
    batch_time: Duration = BATCH_TIME,
    checkpoint: str | None = None,
    on_batch: Callable[[Batch], None] | None = None,
    on_trouble: Callable[[str], None] | None = None,
    stop: threading.Event | None = None,
) -> list[Summary]:
    """Runs pipelines side by side in one Spark session. See `Pipeline.run`."""
    if max_per_batch < 1:
        raise InvalidArgument("max_per_batch must be at least 1")
    if checkpoint is not None and len(pipelines) > 1:
        raise InvalidArgument("a checkpoint is for one pipeline", "Leave it out: none has to be kept.")
    for pipeline in pipelines:
        pipeline.require_complete()
    waits = seconds_or_none(drain)
    aim = seconds(batch_time)
    if aim <= 0:
        raise InvalidArgument("batch_time must be more than nothing")
    stop = stop or threading.Event()
    with opened(database) as c, started(pipelines, c, spark, master) as shared:
        require_able(shared, c.database_url, stop=stop, trouble=on_trouble)
        for pipeline in pipelines:
            prepare(pipeline, c)
        runs = [
            Driving(
                pipeline,
                c,
                shared,
                one_pass=available_now or drain is not None,
                drain=waits,
                max_per_batch=max_per_batch,
                batch_time=aim,
                checkpoint=checkpoint,
                on_batch=on_batch or (lambda _: None),
                on_trouble=on_trouble or (lambda _: None),
                stop=stop,
            )
            for pipeline in pipelines
        ]
        with stopped_by_signals(stop.set):
            _side_by_side(runs, stop)
        return [one.summary() for one in runs]


def _side_by_side(runs: Sequence[Driving], stop: threading.Event) -> None:
    """Each in a thread of its own; the first that fails stops the others, and its error is raised."""
    errors: list[BaseException] = []

    def guarded(one: Driving) -> None:
        try:
            one.run()
        except BaseException as error:
            errors.append(error)
            stop.set()

    threads = [threading.Thread(target=guarded, args=[one], name=f"custody {one.pipeline.name}") for one in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():  # a join without a time-out would keep the signal's handler from running
            thread.join(0.2)
    if errors:
        raise errors[0]


@contextmanager
def opened(database: Custody | str | None) -> Iterator[Custody]:
    """Custody as it was given, or opened for as long as it is needed."""
    if isinstance(database, Custody):
        yield database
        return
    with api.connect(database) as c:
        yield c


@contextmanager
def started(
    pipelines: Sequence[Pipeline], c: Custody, spark: SparkSession | None, master: str | None
) -> Iterator[SparkSession]:
    """A session for these pipelines; a topic that is missing is refused before Spark is started for it."""
    for pipeline in pipelines:
        for topic in (pipeline.source, *pipeline.sinks):
            c.topic(topic)
    with own_session(spark, master) as shared:
        yield shared


@contextmanager
def own_session(spark: SparkSession | None, master: str | None) -> Iterator[SparkSession]:
    """The session that was given or is there; else one of our own, stopped at the end."""
    from pyspark import SparkContext

    if spark is not None:
        require_fit(spark)
        ship(spark)
        yield spark
        return
    mine = SparkContext._active_spark_context is None
    made = session(master=master, app_name="custody pipeline")
    try:
        if not mine:
            require_fit(made)
        ship(made)
        yield made
    except KeyboardInterrupt:  # a second one: nothing is finished any more, and Java need not say so
        made.sparkContext.setLogLevel("OFF")
        raise
    finally:
        if mine:
            made.stop()


def prepare(pipeline: Pipeline, c: Custody) -> None:
    """Makes the group if it is not there, or gives it the pipeline's policy and bindings."""
    try:
        group = c.group(pipeline.source, pipeline.group)
    except GroupNotFound:
        c.create_group(
            pipeline.source, pipeline.group, pipeline.policy, start=pipeline.start, bindings=pipeline.bindings
        )
        return
    if pipeline.policy is not None and group.policy != pipeline.policy:
        c.update_group(pipeline.source, pipeline.group, pipeline.policy)
    if pipeline.bindings is not None and group.bindings != pipeline.bindings:
        c.bind(pipeline.source, pipeline.group, pipeline.bindings)
