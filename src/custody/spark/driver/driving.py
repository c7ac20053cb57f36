"""Drives one pipeline: runs its streaming query, restarts it when it fails, and renews the leases in a thread.

Spark's checkpoint is temporary: all state is in PostgreSQL. `settlement` processes the batches.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from custody.engine import Custody
from custody.errors import ClaimLost, CustodyError, PipelineFailed, PipelineFenced, TopicChanged, Transient
from custody.model.policy import seconds, seconds_or_none
from custody.spark.driver.batch_jobs import BatchJobs, Shape
from custody.spark.driver.checkpoint_files import written_by_file_system
from custody.spark.driver.group_reader import ClaimOptions, ClaimSource, own_source
from custody.spark.driver.reporting import Report
from custody.spark.driver.settlement import Epoch, Settlement
from custody.spark.driver.watching import Watch, within
from custody.spark.environment import shipping
from custody.spark.faults import GONE, described, ours
from custody.spark.figures import PipelineSummary, outlook
from custody.spark.outside.cached_rows import CachedRows
from custody.spark.outside.staged_writes import StagedWrites
from custody.spark.pipeline import Pipeline
from custody.spark.settings import RunSettings
from custody.spark.tasks.job import Job
from custody.verbs.pipelines import DriverVerbs, PassLimit
from custody.verbs.upkeep import keep_up
from custody.vitals import Vitals

logger = logging.getLogger(__name__)

ENDING = 10.0
"""Seconds that Spark has to end a cancelled job or a stopped query."""
IDLE = 10.0
"""Seconds after which a query that has not failed, and has no batch, is taken to be well."""
FIRST_PAUSE = 0.5
"""Seconds until a query that failed after a batch is started again; twice as many each time that there was none."""
_STARTING = threading.Lock()


class Driving:
    """One pipeline while it runs, in the driver's process."""

    def __init__(
        self, pipeline: Pipeline, shape: Shape, c: Custody, spark: SparkSession, settings: RunSettings
    ) -> None:
        self.pipeline, self._c, self._spark, self._settings = pipeline, c, spark, settings
        self._stop, self._checkpoint = settings.stop, settings.checkpoint
        policy = c.group(pipeline.source, pipeline.group).policy
        assert policy is not None
        self._policy = policy
        self._visibility = seconds(policy.visibility_timeout)
        self._shape = shape
        self.error: Exception | None = None
        """The error with which the pipeline failed."""
        self._report = Report()
        self._fenced: PipelineFenced | None = None
        self._in_batch = threading.Lock()
        self._ending = threading.Event()
        self._grace = settings.grace_seconds
        self._watch = Watch(spark, trouble=self.trouble, overdue=lambda: self._epoch.drive.overdue())
        self._settlement = Settlement(
            pipeline.name, c, settings, ending=self._ending, report=self._report, trouble=self.trouble
        )
        self._last_epoch: int | None = None
        self._restarts = 0
        self._only: PassLimit | None = None
        self._give_up_at: float | None = None
        self._started = time.monotonic()
        self._vitals = settings.vitals.get(pipeline.name) or Vitals("driving")
        (self._pulse,) = self._vitals.pulses

    def run(self) -> None:
        """Runs until it is stopped, the pass is over, a newer driver takes over, or an error is final."""
        try:
            with self._report:
                self._run()
        except Exception as error:
            self.error = error
            raise
        finally:
            self._pulse.end()

    def _run(self) -> None:
        pause, settled = FIRST_PAUSE, self._settlement
        while not self._stop.is_set():
            self._pulse.beat()
            batches = settled.batches
            error: BaseException | None
            try:
                self._epoch = self._take_over()
                self._epoch.writes.finish()
                error = self._query()
            except (Transient, PySparkException, Py4JError, OSError) as unavailable:
                error = unavailable
            fatal = self._fenced or settled.fatal
            if fatal is not None:
                raise fatal
            if error is None or self._stop.is_set():
                return
            if isinstance(error, GONE):
                raise PipelineFailed(
                    "Spark's JVM has died", "Start the pipeline again: it continues where it was."
                ) from error
            known = ours(error)
            if known is not None and not isinstance(known, Transient | TopicChanged | ClaimLost):
                raise known  # fenced, or its topic or group was deleted
            settled.failures = 1 if settled.batches > batches else settled.failures + 1
            # wait for a database that is down, however long it takes; but a pass has to end
            if settled.exhausted and (self._settings.one_pass or not isinstance(known, Transient)):
                raise PipelineFailed(
                    f"pipeline {self.pipeline.name} failed {settled.failures} times in a row: {described(error)}",
                    "Fix the cause and start it again: nothing was lost, and no failure was counted.",
                )
            if settled.batches == batches:
                # perhaps because of the checkpoint: Spark refuses one that a killed driver left half written
                self._checkpoint = None
            pause = FIRST_PAUSE if settled.batches > batches else min(pause * 2, 30.0)
            self._report.failed(described(error), settled.failures)
            self.trouble(f"the query failed and restarts in {pause:g} s: {described(error)}")
            self._restarts += 1
            self._pulse.beat(waits=pause)
            self._stop.wait(pause)

    def abandon(self) -> None:
        """Cancels the running batch without waiting."""
        with suppress(Py4JError, *GONE):
            self._watch.cancel()

    def _take_over(self) -> Epoch:
        """Begins a new epoch: the previous driver is fenced, and its claim in flight is ours."""
        # after our first epoch, only if the last epoch is ours: any other driver is newer
        drive, found = self._c.drive(
            self.pipeline.source, self.pipeline.group, visibility_timeout=self._visibility, after=self._last_epoch
        )
        self._last_epoch = drive.driver.epoch
        if self.pipeline.state is not None:
            drive.require_keyed()
        self._report.drives(drive)
        if self._settings.one_pass and self._only is None:
            drain = self._settings.drain_seconds
            self._only = found if drain is None else replace(found, due=None)
            self._give_up_at = None if drain is None else time.time() + drain
        job = self._job(drive)
        for sink in self.pipeline.outside:
            sink.begins(self._c.database_url)
        jobs = BatchJobs(
            pipeline=self.pipeline,
            spark=self._spark,
            drive=drive,
            job=job,
            shape=self._shape,
            kept=CachedRows(next(iter(self.pipeline.sinks), None)),
            watch=self._watch,
            stopping=self._stop.is_set,
            trouble=self.trouble,
        )
        writes = StagedWrites(
            pipeline=self.pipeline, spark=self._spark, drive=drive, stopping=self._stop.is_set, trouble=self.trouble
        )
        return Epoch(drive=drive, job=job, jobs=jobs, writes=writes)

    @property
    def _doing(self) -> str:
        """What a batch runs, as text for people."""
        if self.pipeline.transform is not None:
            return "the frame"
        return f"the handler {getattr(self.pipeline.function, '__name__', 'of the pipeline')}"

    def summary(self) -> PipelineSummary:
        totals = vars(self._settlement.totals)
        return PipelineSummary(
            pipeline=self.pipeline.name,
            batches=self._settlement.batches,
            **{name: count for name, count in totals.items() if name != "repeated"},
            restarts=self._restarts,
            seconds=time.monotonic() - self._started,
            unmet=dict(sorted(self._settlement.unmet.items())),
            error=None if self.error is None else str(self.error),
            left=outlook(self._c, self.pipeline.source, self.pipeline.group),
        )

    def _job(self, drive: DriverVerbs) -> Job:
        """The job description for tasks."""
        policy, source = self._policy, self._c.topic(self.pipeline.source)
        return Job(
            url=self._c.database_url,
            topic=self.pipeline.source,
            group=self.pipeline.group,
            group_id=drive.driver.group_id,
            ordered=policy.ordering == "key",
            on_dead=policy.on_dead,
            handler_timeout=seconds_or_none(policy.handler_timeout),
            sinks={name: drive.sink(name) for name in self.pipeline.sinks},
            schema=None if self._shape.schema is None else self._shape.schema.jsonValue(),
            topic_uid=source.uid,
            priorities=source.priorities,
            keeps=bool(self.pipeline.outside),
            state=self._shape.state,
        )

    def _query(self) -> BaseException | None:
        """Runs one streaming query to its end and returns its error, if it failed."""
        driver = self._epoch.drive.driver
        claims = ClaimOptions(
            topic=driver.topic,
            group=driver.group,
            group_id=driver.group_id,
            epoch=driver.epoch,
            driver=driver.name,
            visibility=self._visibility,
            max_messages=self._settlement.max_per_batch,
            batch_time=self._settings.batch_seconds,
            tasks=self._spark.sparkContext.defaultParallelism,
            ordered=self._epoch.job.ordered,
            until=None if self._only is None else self._only.until,
            due=None if self._only is None else self._only.due,
            give_up_at=self._give_up_at,
        )
        temporary = None if self._checkpoint else shipping.temporary(self._spark.sparkContext, "checkpoint")
        ended = threading.Event()
        self._ending.clear()
        query: StreamingQuery | None = None
        try:
            # before the query, because its source may claim before the query object exists
            threading.Thread(target=self._keep, args=[ended], name="custody keeper", daemon=True).start()
            maintain = partial(self._c.maintain, driver.topic)
            threading.Thread(target=keep_up, args=[maintain, ended], name="custody upkeep", daemon=True).start()
            # a URI, because Spark looks up a bare path on its default file system
            query = self._start(claims, temporary.as_uri() if temporary is not None else str(self._checkpoint))
            since = time.monotonic()
            while query.isActive and not self._stop.is_set() and self._fenced is None:
                self._pulse.beat()
                query.awaitTermination(0.2)  # type: ignore[arg-type]  # declared int; a float is taken
                if time.monotonic() - since > IDLE and not self._in_batch.locked():
                    self._report.goes_well()  # it claims, but there are no messages
            return None if self._stop.is_set() else self._outcome(query)
        except (PySparkException, *GONE) as error:
            return error
        finally:
            self._ending.set()
            self._end_batch()
            if query is not None:
                within(ENDING, partial(_stop_query, query), "custody stop")
            ended.set()
            self._give_back()
            if temporary is not None:
                shutil.rmtree(temporary, ignore_errors=True)

    def _end_batch(self) -> None:
        """Waits up to the grace period until the running batch is committed. No new batch begins."""
        self._pulse.beat(waits=self._grace + ENDING)
        if self._batch_ended(self._grace):
            return
        self.trouble(f"the running batch has not ended within {self._grace:g} s and is cancelled")
        until = time.monotonic() + ENDING
        while time.monotonic() < until:
            self.abandon()
            if self._batch_ended(0.5):
                return
        self.trouble("the batch does not end and is abandoned; its commit would be refused")

    def _batch_ended(self, timeout: float) -> bool:
        if not self._in_batch.acquire(timeout=timeout):
            return False
        self._in_batch.release()
        return True

    def _start(self, claims: ClaimOptions, checkpoint: str) -> StreamingQuery:
        name = f"{ClaimSource.name()}_{claims.group_id}_{claims.epoch}"
        with _STARTING:
            self._spark.dataSource.register(own_source(name))
        source = self._spark.readStream.format(name).option("url", self._epoch.job.url)
        writer = (
            source.option("claims", claims.encoded())
            .load()
            .writeStream.foreachBatch(self._batch)
            .queryName(f"{self.pipeline.name} (epoch {claims.epoch})")
            .option("checkpointLocation", checkpoint)
        )
        one_pass = self._settings.one_pass
        writer = writer.trigger(availableNow=True) if one_pass else writer.trigger(processingTime="0 seconds")
        with _STARTING:
            if self._checkpoint:
                return writer.start()
            with written_by_file_system(self._spark):
                return writer.start()

    def _outcome(self, query: StreamingQuery) -> BaseException | None:
        try:
            query.awaitTermination(1)
        except PySparkException as error:
            return error
        return None

    def _give_back(self) -> None:
        """Releases a claim that was not run, so that it need not expire."""
        try:
            self._epoch.drive.release()
        except CustodyError as error:
            logger.debug("the claim in flight was not released: %s", error)

    def _keep(self, ended: threading.Event) -> None:
        """Renews the leases of the claim in flight while the query runs."""
        while not ended.wait(self._visibility / 3):
            if not self._in_batch.locked():
                continue  # a new claim is leased anyway, and an idle pipeline should not query the database
            try:
                self._epoch.drive.keep()
            except PipelineFenced as error:
                self._fenced = error
                return
            except CustodyError as error:
                logger.debug("the leases were not renewed: %s", error)

    def trouble(self, text: str) -> None:
        logger.warning("%s: %s", self.pipeline.name, text)
        self._settings.tell(self._settings.on_trouble, f"{self.pipeline.name}: {text}")

    def _batch(self, references: DataFrame, batch_id: int) -> None:
        """Processes a micro-batch until its claim is committed, lost, or taken over. Runs in the driver."""
        with self._in_batch, self._watch.batch(self._doing):
            self._vitals.began = time.monotonic()
            try:
                self._settlement.settle(self._epoch, references, batch_id)
            finally:
                self._vitals.began = None
            if self.pipeline.outside:
                self._epoch.writes.finish()  # if this fails, the query fails, and its next start does it


def _stop_query(query: StreamingQuery) -> None:
    with suppress(PySparkException, *GONE):
        query.stop()
