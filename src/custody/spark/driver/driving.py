"""Driving one pipeline: its streaming query, started again when it fails, while a thread keeps the leases alive.

Spark's checkpoint is temporary: all truth is in Postgres. What is done with a batch is in `settlement`.
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
from custody.verbs.pipelines import Drive, Pass
from custody.verbs.upkeep import keep_up

logger = logging.getLogger(__name__)

ENDING = 10.0
"""Seconds that Spark has to end what was cancelled, or a query that was stopped."""
IDLE = 10.0
"""Seconds after which a query that has not failed, and has no batch, is taken to be well."""
_REGISTERING = threading.Lock()


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
        """What the pipeline failed of."""
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
        self._only: Pass | None = None
        self._give_up_at: float | None = None
        self._started = time.monotonic()

    def run(self) -> None:
        """Until it is stopped, the pass is over, a newer driver takes over, or nothing helps."""
        try:
            with self._report:
                self._run()
        except Exception as error:
            self.error = error
            raise

    def _run(self) -> None:
        pause, settled = 0.5, self._settlement
        while not self._stop.is_set():
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
                    "Spark's JVM is gone", "Start the pipeline again: it goes on where it was."
                ) from error
            known = ours(error)
            if known is not None and not isinstance(known, Transient | TopicChanged | ClaimLost):
                raise known  # fenced, or its topic or group is gone
            settled.failures = 1 if settled.batches > batches else settled.failures + 1
            # a database that is down is waited for, however long; a pass has to end
            if settled.exhausted and (self._settings.one_pass or not isinstance(known, Transient)):
                raise PipelineFailed(
                    f"pipeline {self.pipeline.name} failed {settled.failures} times in a row: {described(error)}",
                    "Mend what the error names and start it again: nothing was lost, and nobody was charged.",
                )
            if settled.batches == batches:
                # it may be the checkpoint: Spark refuses one that a killed driver left half written, and none is needed
                self._checkpoint = None
            pause = 0.5 if settled.batches > batches else min(pause * 2, 30.0)
            self._report.failed(described(error), settled.failures)
            self.trouble(f"the query failed and starts again in {pause:g} s: {described(error)}")
            self._restarts += 1
            self._stop.wait(pause)

    def abandon(self) -> None:
        """Cancels the batch that runs, and waits for nothing."""
        with suppress(Py4JError, *GONE):
            self._watch.cancel()

    def _take_over(self) -> Epoch:
        """A new epoch: whoever drove the pipeline before is fenced, and what it had in flight is ours."""
        # once we have driven, only after ourselves: whoever came meanwhile is newer
        drive, found = self._c.drive(
            self.pipeline.source, self.pipeline.group, visibility_timeout=self._visibility, after=self._last_epoch
        )
        self._last_epoch = drive.driver.epoch
        self._report.drives(drive)
        if self._settings.one_pass and self._only is None:
            drain = self._settings.drain_seconds
            self._only = found if drain is None else replace(found, due=None)
            self._give_up_at = None if drain is None else time.time() + drain
        job = self._job(drive)
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
        """What a batch runs, for people."""
        handler = self.pipeline.handler
        return "the frame" if handler is None else f"the handler {getattr(handler, '__name__', 'of the pipeline')}"

    def summary(self) -> PipelineSummary:
        totals = self._settlement.totals
        return PipelineSummary(
            pipeline=self.pipeline.name,
            batches=self._settlement.batches,
            messages=totals.messages,
            done=totals.done,
            failed=totals.failed,
            dead=totals.dead,
            later=totals.later,
            released=totals.released,
            lost=totals.lost,
            outputs=totals.outputs,
            restarts=self._restarts,
            seconds=time.monotonic() - self._started,
            error=None if self.error is None else str(self.error),
            left=outlook(self._c, self.pipeline.source, self.pipeline.group),
        )

    def _job(self, drive: Drive) -> Job:
        """What tasks are told."""
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
        )

    def _query(self) -> BaseException | None:
        """One streaming query from its start to its end; what it failed of, if it did."""
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
            # before the query: a first claim may be taken before it is there
            threading.Thread(target=self._keep, args=[ended], name="custody keeper", daemon=True).start()
            maintain = partial(self._c.maintain, driver.topic)
            threading.Thread(target=keep_up, args=[maintain, ended], name="custody upkeep", daemon=True).start()
            # a URI: as a bare path it would be looked for on Spark's default file system
            query = self._start(claims, temporary.as_uri() if temporary is not None else str(self._checkpoint))
            since = time.monotonic()
            while query.isActive and not self._stop.is_set() and self._fenced is None:
                query.awaitTermination(0.2)  # type: ignore[arg-type]  # declared int; a float is taken
                if time.monotonic() - since > IDLE and not self._in_batch.locked():
                    self._report.goes_well()  # it claims, and there is nothing to be had
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
        """A batch that runs is finished and committed, within the grace period; none begins any more."""
        if self._batch_ended(self._grace):
            return
        self.trouble(f"the batch that runs has not ended within {self._grace:g} s and is cancelled")
        until = time.monotonic() + ENDING
        while time.monotonic() < until:
            self.abandon()
            if self._batch_ended(0.5):
                return
        self.trouble("the batch cannot be ended, and is left behind: what it would still commit is refused")

    def _batch_ended(self, timeout: float) -> bool:
        if not self._in_batch.acquire(timeout=timeout):
            return False
        self._in_batch.release()
        return True

    def _start(self, claims: ClaimOptions, checkpoint: str) -> StreamingQuery:
        name = f"{ClaimSource.name()}_{claims.group_id}_{claims.epoch}"
        with _REGISTERING:
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
        return writer.start()

    def _outcome(self, query: StreamingQuery) -> BaseException | None:
        try:
            query.awaitTermination(1)
        except PySparkException as error:
            return error
        return None

    def _give_back(self) -> None:
        """A claim that was not run need not wait for its lease to expire."""
        try:
            self._epoch.drive.release()
        except CustodyError as error:
            logger.debug("the claim in flight was not released: %s", error)

    def _keep(self, ended: threading.Event) -> None:
        """Keeps the leases of the claim in flight alive, as long as this process lives."""
        while not ended.wait(self._visibility / 3):
            if not self._in_batch.locked():
                continue  # the source has just renewed what it claims, and an idle pipeline asks nothing
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
        """Runs in the driver, for each micro-batch: until its claim is committed, lost, or taken over."""
        with self._in_batch, self._watch.batch(self._doing):
            self._settlement.settle(self._epoch, references, batch_id)
            if self.pipeline.outside:
                self._epoch.writes.finish()  # if this fails the query does, and its next start does it


def _stop_query(query: StreamingQuery) -> None:
    with suppress(PySparkException, *GONE):
        query.stop()
