"""Runs pipelines concurrently in one Spark session, until they are stopped or their pass is over."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from pyspark.sql import SparkSession

import custody as api
from custody.engine import Custody
from custody.errors import GroupNotFound, InvalidArgument, Transient
from custody.model.policy import Policy
from custody.spark.arguments import require_order
from custody.spark.causes import PAUSED
from custody.spark.driver.batch_jobs import shape_of
from custody.spark.driver.driving import ENDING, Driving
from custody.spark.driver.watching import within
from custody.spark.environment.own_session import require_fit
from custody.spark.environment.probe import require_able
from custody.spark.environment.shipping import ship
from custody.spark.faults import described
from custody.spark.figures import PipelineSummary
from custody.spark.pipeline import Pipeline
from custody.spark.session import session
from custody.spark.settings import RunSettings
from custody.worker.signals import stopped_by_signals


def run(
    pipelines: Sequence[Pipeline],
    database: Custody | str | None = None,
    settings: RunSettings | None = None,
    *,
    spark: SparkSession | None = None,
    master: str | None = None,
) -> list[PipelineSummary]:
    """Runs pipelines concurrently in one Spark session. One that fails does not end the others; at the end the first
    error is raised. See `Pipeline.run`."""
    summaries, errors = run_all(pipelines, database, settings, spark=spark, master=master)
    if errors:
        raise errors[0]
    return summaries


def run_all(
    pipelines: Sequence[Pipeline],
    database: Custody | str | None = None,
    settings: RunSettings | None = None,
    *,
    spark: SparkSession | None = None,
    master: str | None = None,
) -> tuple[list[PipelineSummary], list[Exception]]:
    """As `run`, but returns the summaries and the errors of those that failed."""
    settings = settings or RunSettings()
    if settings.checkpoint is not None and len(pipelines) > 1:
        raise InvalidArgument(
            "a checkpoint is for one pipeline, not for several", "Leave it out: no checkpoint has to be kept."
        )
    for pipeline in pipelines:
        pipeline.require_complete()
    with opened(database) as c, started(pipelines, c, spark, master) as shared:
        require_able(shared, c.database_url, stop=settings.stop, trouble=settings.on_trouble)
        shapes = [shape_of(pipeline, shared) for pipeline in pipelines]
        for pipeline in pipelines:
            prepare(pipeline, c)
        runs = [
            Driving(pipeline, shape, c, shared, settings) for pipeline, shape in zip(pipelines, shapes, strict=True)
        ]
        with stopped_by_signals(settings.stop.set):
            try:
                _side_by_side(runs)
            except KeyboardInterrupt:  # the second one, after which nothing is awaited
                for one in runs:
                    one.abandon()
                raise
        errors = [one.error for one in runs if one.error is not None]
        try:
            return [one.summary() for one in runs], errors
        except Transient:  # the database cannot be asked what is left, perhaps for the reason that made them fail
            if errors:
                raise errors[0] from None
            raise


def _side_by_side(runs: Sequence[Driving]) -> None:
    """Runs each in its own thread. One that fails keeps its error, and the others go on."""

    def guarded(one: Driving) -> None:
        try:
            one.run()
        except Exception as error:
            if len(runs) > 1:
                one.trouble(f"failed; the other pipelines go on: {described(error)}")

    threads = [
        threading.Thread(target=guarded, args=[one], name=f"custody {one.pipeline.name}", daemon=True) for one in runs
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():  # a join without a timeout would keep the signal handler from running
            thread.join(0.2)


@contextmanager
def opened(database: Custody | str | None) -> Iterator[Custody]:
    """The given Custody, or one that is opened and closed here."""
    if isinstance(database, Custody):
        yield database
        return
    with api.connect(database) as c:
        yield c


@contextmanager
def started(
    pipelines: Sequence[Pipeline], c: Custody, spark: SparkSession | None, master: str | None
) -> Iterator[SparkSession]:
    """A session for these pipelines. A missing topic is refused before Spark is started."""
    for pipeline in pipelines:
        for topic in (pipeline.source, *pipeline.sinks):
            c.topic(topic)
    with session_for(spark, master) as shared:
        yield shared


@contextmanager
def session_for(spark: SparkSession | None, master: str | None) -> Iterator[SparkSession]:
    """The given or the active session; else a new one, which is stopped at the end."""
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
    except KeyboardInterrupt:  # the second one: nothing is finished, and Java's messages about that are not wanted
        made.sparkContext.setLogLevel("OFF")
        raise
    finally:
        if mine:
            within(ENDING, made.stop, "custody spark stop")  # the JVM ends with this process anyway


def prepare(pipeline: Pipeline, c: Custody) -> None:
    """Creates the group, or gives the existing one the pipeline's policy and bindings."""
    try:
        group = c.group(pipeline.source, pipeline.group)
    except GroupNotFound:
        if pipeline.state is not None:
            require_order(pipeline.policy or Policy(), pipeline.name)
        c.create_group(
            pipeline.source, pipeline.group, pipeline.policy, start=pipeline.start, bindings=pipeline.bindings
        )
        return
    if (group.paused_reason or "").startswith(PAUSED):
        c.resume(pipeline.source, pipeline.group)  # it was paused because the code was wrong; this may be new code
    if pipeline.policy is not None and group.policy != pipeline.policy:
        c.update_group(pipeline.source, pipeline.group, pipeline.policy)
    if pipeline.bindings is not None and group.bindings != pipeline.bindings:
        c.bind(pipeline.source, pipeline.group, pipeline.bindings)
