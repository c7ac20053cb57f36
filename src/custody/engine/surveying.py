"""Verbs that look at all topics and groups at once. Their number of queries does not grow with the groups."""

from __future__ import annotations

from collections import defaultdict

from custody.engine.groups import describe_group
from custody.engine.operating import Operating
from custody.engine.schedules import Schedules
from custody.errors import Busy
from custody.model.entities import Group
from custody.model.insights import GroupFigures, TopicFigures
from custody.model.policy import Duration, interval, seconds
from custody.model.status import (
    WINDOW,
    GroupStatus,
    OutboxStatus,
    ScheduleStatus,
    Status,
    WorkerStatus,
    troubles,
    worst_first,
)
from custody.outbox.events import Figures as OutboxFigures
from custody.verbs import pipelines
from custody.wire.reports import GroupOut
from custody.wire.verb import verb

TROUBLED = ("failing", "late", "unattended")


class Surveying(Operating, Schedules):
    """Everything at one look."""

    def overview(
        self, *, timeout: Duration = "5s"
    ) -> tuple[list[TopicFigures], list[GroupFigures], list[OutboxFigures]]:
        """The figures of all topics, all groups and the outbox, at a cost that does not grow with the log."""
        most = str(round(seconds(timeout) * 1000))
        try:
            return self._overview(most)
        except Busy:  # a segment may have been dropped while it was read
            return self._overview(most)

    def _overview(self, most: str) -> tuple[list[TopicFigures], list[GroupFigures], list[OutboxFigures]]:
        """`most`: the timeout of each statement in milliseconds; `busy` if one takes longer."""
        with self._db.transaction() as connection:
            connection.execute("SELECT set_config('statement_timeout', %s, true)", [most])
            topics = [TopicFigures(**row) for row in self._rows("topic_figures", on=connection)]
            groups = [
                GroupFigures(group=row.pop("consumer_group"), **row)
                for row in self._rows("group_figures", on=connection)
            ]
            return topics, groups, [OutboxFigures(**row) for row in self._rows("outbox_stats", on=connection)]

    @verb("GET", "/groups", tag="groups", right="consume", everywhere=True, answer=list[GroupOut])
    def all_groups(self) -> list[Group]:
        """The groups of all topics."""
        names = {row["topic_id"]: row["name"] for row in self._db.select("topics", order=["name"])}
        rows = [row for row in self._db.select("groups", order=["name"]) if row["topic_id"] in names]
        return sorted((describe_group(names[row["topic_id"]], row) for row in rows), key=lambda one: one.topic)

    @verb("GET", "/workers", tag="operating", right="consume", everywhere=True, answer=list[WorkerStatus])
    def workers(self) -> list[WorkerStatus]:
        """The workers that hold messages, or worked in the last minute: what is in flight, and the last claim of each.

        Somebody who finds nothing to claim leaves no trace in the database. Rates are over a minute, or over the last
        10,000 entries of the journal.
        """
        rows = self._rows("recent_work", window=interval(WINDOW))
        return [WorkerStatus(group=row.pop("consumer_group"), **row) for row in rows]

    @verb("GET", "/status", tag="operating", right="consume", everywhere=True, answer=Status)
    def status(self) -> Status:
        """The state of all topics and groups, the worst first, of the outbox, and schedules that are in trouble.

        A group is in trouble (`trouble`) if its pipeline failed, is gone or retries, its breaker is open, it is paused,
        it has dead letters, or messages have waited for over a minute and nobody claims. Rates are those of `workers`.
        """
        topics, groups, outbox = self.overview()
        working = defaultdict(list)
        for one in self.workers():
            working[one.topic, one.group].append(one)
        running = {(one.topic, one.group): one.state for one in pipelines.states(self._db, None, None)}
        return Status(
            topics=tuple(topics),
            groups=worst_first(
                _group_status(one, working[one.topic, one.group], running.get((one.topic, one.group))) for one in groups
            ),
            schedules=tuple(
                ScheduleStatus(
                    name=one.name, topic=one.topic, state=one.state, next_at=one.next_at, last_error=one.last_error
                )
                for one in self.schedules()
                if one.state in TROUBLED
            ),
            outbox=tuple(
                OutboxStatus(**{name: getattr(one, name) for name in OutboxStatus.__dataclass_fields__})
                for one in outbox
            ),
        )


def _group_status(one: GroupFigures, working: list[WorkerStatus], pipeline: str | None) -> GroupStatus:
    figures = {name: value for name, value in vars(one).items() if name != "holes"}
    return GroupStatus(
        **figures,
        trouble=troubles(
            lag=one.lag,
            dead=one.dead,
            oldest_unresolved_age=one.oldest_unresolved_age,
            workers=len(working),
            paused=one.paused,
            breaker=one.breaker,
            pipeline=pipeline,
        ),
        claimed_rate=sum(worker.claimed_rate for worker in working),
        done_rate=sum(worker.done_rate for worker in working),
        failed_rate=sum(worker.failed_rate for worker in working),
        workers=len(working),
        last_claim_age=min((age for worker in working if (age := worker.last_claim_age) is not None), default=None),
        pipeline=pipeline,
    )
