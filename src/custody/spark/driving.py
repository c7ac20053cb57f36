"""Driving one pipeline: its streaming query, started again when it fails, and its batches, each until it is committed.

What rows do is isolated and charged to them; what the infrastructure does is waited out, while a thread keeps the
leases alive. Spark's checkpoint is temporary: all truth is in Postgres.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from py4j.protocol import Py4JError, Py4JNetworkError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from custody.engine import Custody
from custody.errors import (
    ClaimLost,
    CustodyError,
    PipelineFailed,
    PipelineFenced,
    QueueFull,
    StageLost,
    TopicChanged,
    Transient,
)
from custody.outcomes import Outcome
from custody.pipelines import Committed, Pass, Work
from custody.policy import seconds, seconds_or_none
from custody.spark import frame
from custody.spark.faults import described, fault, ours, worker_died
from custody.spark.figures import Batch, Summary, outlook
from custody.spark.group_reader import Claims, ClaimSource, own_source
from custody.spark.job import Job
from custody.spark.keeping import Kept
from custody.spark.pipeline import Pipeline
from custody.spark.working import Batches, parsed
from custody.spark.writing import Writing
from custody.upkeep import keep_up

logger = logging.getLogger(__name__)

RESTARTS = 8
"""Failures in a row, without a batch committed in between, after which a pipeline gives up."""
KILLERS = 100
"""The same for batches whose Python workers die: each time that comes closer to the message which does it."""
_REGISTERING = threading.Lock()
GONE = (Py4JNetworkError, ConnectionError)
"""What a call raises when Spark's JVM has died."""


class TooLarge(Exception):
    """A batch that its sink can never take as a whole."""


class Driving:
    """One pipeline while it runs, in the driver's process."""

    def __init__(
        self,
        pipeline: Pipeline,
        c: Custody,
        spark: SparkSession,
        *,
        one_pass: bool,
        drain: float | None,
        max_per_batch: int,
        batch_time: float,
        checkpoint: str | None,
        on_batch: Callable[[Batch], None],
        on_trouble: Callable[[str], None],
        stop: threading.Event,
    ) -> None:
        self.pipeline, self._c, self._spark = pipeline, c, spark
        self._one_pass, self._drain, self._max, self._batch_time = one_pass, drain, max_per_batch, batch_time
        self._checkpoint, self._on_batch, self._on_trouble, self._stop = checkpoint, on_batch, on_trouble, stop
        policy = c.group(pipeline.source, pipeline.group).policy
        assert policy is not None
        self._policy = policy
        self._visibility = seconds(policy.visibility_timeout)
        self._schema = parsed(pipeline.schema)
        self._narrow = pipeline.transform is not None and frame.check(
            spark, pipeline.transform, self._schema, published=bool(pipeline.sinks), keeps=bool(pipeline.outside)
        )
        self._fenced: PipelineFenced | None = None
        self._fatal: CustodyError | None = None
        self._in_batch = threading.Lock()
        self._ending = threading.Event()
        self._epoch: int | None = None
        self._totals = Committed(False, 0, 0, 0, 0, 0, 0, 0, 0)
        self._batches = self._restarts = self._failures = 0
        self._only: Pass | None = None
        self._give_up_at: float | None = None
        self._started = time.monotonic()

    def run(self) -> None:
        """Until it is stopped, the pass is over, a newer driver takes over, or nothing helps."""
        pause = 0.5
        while not self._stop.is_set():
            batches = self._batches
            error: BaseException | None
            try:
                self._take_over()
                self._writing.finish()
                error = self._query()
            except (Transient, PySparkException, Py4JError, OSError) as unavailable:
                error = unavailable
            if self._fenced is not None:
                raise self._fenced
            if self._fatal is not None:
                raise self._fatal
            if error is None or self._stop.is_set():
                return
            if isinstance(error, GONE):
                raise PipelineFailed(
                    "Spark's JVM is gone", "Start the pipeline again: it goes on where it was."
                ) from error
            known = ours(error)
            if known is not None and not isinstance(known, Transient | TopicChanged | ClaimLost):
                raise known  # fenced, or its topic or group is gone
            self._failures = 1 if self._batches > batches else self._failures + 1
            # a database that is down is waited for, however long; a pass has to end
            if self._failures > RESTARTS and (self._one_pass or not isinstance(known, Transient)):
                raise PipelineFailed(
                    f"pipeline {self.pipeline.name} failed {self._failures} times in a row: {described(error)}",
                    "Mend what the error names and start it again: nothing was lost, and nobody was charged.",
                )
            if self._batches == batches:
                # it may be the checkpoint: Spark refuses one that a killed driver left half written, and none is needed
                self._checkpoint = None
            pause = 0.5 if self._batches > batches else min(pause * 2, 30.0)
            self._trouble(f"the query failed and starts again in {pause:g} s: {described(error)}")
            self._restarts += 1
            self._stop.wait(pause)

    def _take_over(self) -> None:
        """A new epoch: whoever drove the pipeline before is fenced, and what it had in flight is ours."""
        # once we have driven, only after ourselves: whoever came meanwhile is newer
        self._drive, found = self._c.drive(
            self.pipeline.source, self.pipeline.group, visibility_timeout=self._visibility, after=self._epoch
        )
        self._epoch = self._drive.driver.epoch
        if self._one_pass and self._only is None:
            self._only = found if self._drain is None else replace(found, due=None)
            self._give_up_at = None if self._drain is None else time.time() + self._drain
        self._job = self._described()
        self._work = Batches(
            pipeline=self.pipeline,
            spark=self._spark,
            drive=self._drive,
            job=self._job,
            schema=self._schema,
            narrow=self._narrow,
            kept=Kept(next(iter(self.pipeline.sinks), None)),
            stopping=self._stop.is_set,
            trouble=self._trouble,
        )
        self._writing = Writing(pipeline=self.pipeline, spark=self._spark, drive=self._drive, trouble=self._trouble)

    def summary(self) -> Summary:
        totals = self._totals
        return Summary(
            pipeline=self.pipeline.name,
            batches=self._batches,
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
            left=outlook(self._c, self.pipeline.source, self.pipeline.group),
        )

    def _described(self) -> Job:
        policy = self._policy
        return Job(
            url=self._c.database_url,
            topic=self.pipeline.source,
            group=self.pipeline.group,
            group_id=self._drive.driver.group_id,
            ordered=policy.ordering == "key",
            on_dead=policy.on_dead,
            handler_timeout=seconds_or_none(policy.handler_timeout),
            sinks={name: self._drive.sink(name) for name in self.pipeline.sinks},
            schema=None if self._schema is None else self._schema.jsonValue(),
            priorities=self._c.topic(self.pipeline.source).priorities,
            keeps=bool(self.pipeline.outside),
        )

    def _query(self) -> BaseException | None:
        """One streaming query from its start to its end; what it failed of, if it did."""
        driver = self._drive.driver
        claims = Claims(
            topic=driver.topic,
            group=driver.group,
            group_id=driver.group_id,
            epoch=driver.epoch,
            driver=driver.name,
            visibility=self._visibility,
            max_messages=self._max,
            batch_time=self._batch_time,
            tasks=self._spark.sparkContext.defaultParallelism,
            ordered=self._job.ordered,
            until=None if self._only is None else self._only.until,
            due=None if self._only is None else self._only.due,
            give_up_at=self._give_up_at,
        )
        temporary = None if self._checkpoint else Path(tempfile.mkdtemp(prefix="custody-checkpoint-"))
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
            while query.isActive and not self._stop.is_set() and self._fenced is None:
                query.awaitTermination(0.2)  # type: ignore[arg-type]
            return None if self._stop.is_set() else self._outcome(query)
        except (PySparkException, *GONE) as error:
            return error
        finally:
            self._ending.set()
            with self._in_batch:
                pass  # a batch that runs is finished and committed; none begins any more
            if query is not None:
                with suppress(PySparkException, *GONE):
                    query.stop()
            ended.set()
            self._give_back()
            if temporary is not None:
                shutil.rmtree(temporary, ignore_errors=True)

    def _start(self, claims: Claims, checkpoint: str) -> StreamingQuery:
        name = f"{ClaimSource.name()}_{claims.group_id}_{claims.epoch}"
        with _REGISTERING:
            self._spark.dataSource.register(own_source(name))
        source = self._spark.readStream.format(name).option("url", self._job.url)
        writer = (
            source.option("claims", claims.encoded())
            .load()
            .writeStream.foreachBatch(self._batch)
            .queryName(f"{self.pipeline.name} (epoch {claims.epoch})")
            .option("checkpointLocation", checkpoint)
        )
        writer = writer.trigger(availableNow=True) if self._one_pass else writer.trigger(processingTime="0 seconds")
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
            self._drive.release()
        except CustodyError as error:
            logger.debug("the claim in flight was not released: %s", error)

    def _keep(self, ended: threading.Event) -> None:
        """Keeps the leases of the claim in flight alive, as long as this process lives."""
        while not ended.wait(self._visibility / 3):
            if not self._in_batch.locked():
                continue  # the source has just renewed what it claims, and an idle pipeline asks nothing
            try:
                self._drive.keep()
            except PipelineFenced as error:
                self._fenced = error
                return
            except CustodyError as error:
                logger.debug("the leases were not renewed: %s", error)

    def _trouble(self, text: str) -> None:
        logger.warning("%s: %s", self.pipeline.name, text)
        self._on_trouble(f"{self.pipeline.name}: {text}")

    def _batch(self, references: DataFrame, batch_id: int) -> None:
        """Runs in the driver, for each micro-batch: until its claim is committed, lost, or taken over."""
        with self._in_batch:
            self._until_settled(references, batch_id)
            if self.pipeline.outside:
                self._writing.finish()  # if this fails the query does, and its next start does it

    def _until_settled(self, references: DataFrame, batch_id: int) -> None:
        pause, started, careful = 0.2, time.monotonic(), False
        while True:
            if self._stop.is_set() or self._ending.is_set():
                raise InterruptedError("stopped before its commit")  # so that Spark does not take it for done
            try:
                found = self._work.work(references, careful=careful)
                if found is not None:
                    number, work = found
                    done = self._writing.stage(number, work, self._work.kept)
                    self._commit(number, work, done=done, batch_id=batch_id, started=started)
                return
            except ClaimLost as error:
                logger.debug("%s: %s", self.pipeline.name, error)
                return
            except PipelineFenced as error:
                self._fenced = error
                raise
            except Exception as error:
                if isinstance(ours(error), ClaimLost):
                    return
                if isinstance(error, TooLarge) or not self._may_go_on(error):
                    raise
                careful = True
                self._trouble(f"the batch is run again in {pause:g} s: {described(error)}")
                self._stop.wait(pause)
                pause = min(pause * 2, 10.0)
            finally:
                self._work.kept.clear()

    def _may_go_on(self, error: Exception) -> bool:
        """Whether the batch is worth another try: not if the query would fail in the same way for ever."""
        known = ours(error)
        if isinstance(error, GONE) or isinstance(known, TopicChanged):
            return False  # a new start looks at the topics anew
        if isinstance(known, PipelineFenced):
            self._fenced = known
            return False
        if known is not None and not isinstance(known, Transient):
            self._fatal = known
            return False
        if fault(error) == "pipeline":
            self._fatal = PipelineFailed(f"pipeline {self.pipeline.name} cannot be run: {described(error)}")
            return False
        self._failures += 1
        return self._failures <= (KILLERS if worker_died(error) else RESTARTS) or isinstance(known, Transient)

    def _gave_up(self, number: int, work: Work) -> bool:
        """A batch that would not fit its sink even if that were empty is given back, and claims are smaller then. True
        for a message that does not fit alone: it has failed."""
        for name, (topic_id, *_) in self._job.sinks.items():
            most = self._c.topic(name).max_depth
            counts: Counter[int] = Counter()
            for placed in work.placed:
                counts[placed.partition] += placed.messages if placed.topic_id == topic_id else 0
            largest = max(counts.values(), default=0)
            if most is None or largest <= most:
                continue
            parts = self._drive.claimed(number)
            claimed = sum(part.messages for part in parts)
            said = f"{largest:,} for one partition of {name!r}, which holds {most:,}"
            if claimed > 1:
                self._max = max(1, claimed * most // largest // 2)
                raise TooLarge(f"{claimed:,} messages have {said}: claims take at most {self._max:,} from now on")
            work.failed = {
                (part.partition, part.ranges[0][0]): Outcome("nack", error=f"its results are {said}") for part in parts
            }
            work.placed, work.exact = [], False
            return True
        return False

    def _commit(self, number: int, work: Work, *, done: int | None, batch_id: int, started: float) -> None:
        """Until it is known to have happened: a repeat changes nothing."""
        pause = 0.1
        query_id = self._spark.sparkContext.getLocalProperty("sql.streaming.queryId")
        while True:
            try:
                committed = self._drive.commit(number, work, done=done, query_id=query_id, batch_id=batch_id)
                break
            except StageLost:
                raise
            except Transient as error:
                if self._stop.is_set():
                    raise
                if isinstance(error, QueueFull) and self._gave_up(number, work) and done is not None:
                    done = self._writing.stage(number, work, self._work.kept)
                what = "the sink is full" if isinstance(error, QueueFull) else "the commit is tried again"
                self._trouble(f"{what}: {error}")
                self._stop.wait(pause)
                pause = min(pause * 2, 5.0)
        self._c.hint(self._job.sinks)
        with suppress(CustodyError):  # it is only tidied up
            self._drive.drop_stage(number)
        self._failures = 0
        self._batches += 1
        counts: dict[str, Any] = {
            name: getattr(self._totals, name) + getattr(committed, name)
            for name in ("messages", "done", "failed", "dead", "later", "released", "lost", "outputs")
        }
        self._totals = Committed(repeated=False, **counts)
        self._on_batch(
            Batch(pipeline=self.pipeline.name, claim=number, committed=committed, took=time.monotonic() - started)
        )
