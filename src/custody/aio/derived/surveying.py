"""`Surveying` of engine/surveying.py for asyncio. Made by scripts/async_surface.py: do not edit."""

from __future__ import annotations

from custody.aio.derived.operating import Operating
from custody.aio.derived.schedules import Schedules
from custody.bridge import run
from custody.model.entities import Group
from custody.model.insights import GroupFigures, TopicFigures
from custody.model.policy import Duration
from custody.model.status import Status, WorkerStatus
from custody.outbox.events import Figures as OutboxFigures


class Surveying(Operating, Schedules):
    """Everything at one look."""

    async def overview(
        self, *, timeout: Duration = "5s"
    ) -> tuple[list[TopicFigures], list[GroupFigures], list[OutboxFigures]]:
        """The figures of all topics, all groups and the outbox, at a cost that does not grow with the log."""
        return await run(lambda: self._of.overview(timeout=timeout))

    async def all_groups(self) -> list[Group]:
        """The groups of all topics."""
        return await run(lambda: self._of.all_groups())

    async def workers(self) -> list[WorkerStatus]:
        """The workers that hold messages, or worked in the last minute: what is in flight, and the last claim of each.

        Somebody who finds nothing to claim leaves no trace in the database. Rates are over a minute, or over the last
        10,000 entries of the journal.
        """
        return await run(lambda: self._of.workers())

    async def status(self) -> Status:
        """The state of all topics and groups, the worst first, of the outbox, and schedules that are in trouble.

        A group is in trouble (`trouble`) if its pipeline failed, is gone or retries, its breaker is open, it is paused,
        it has dead letters, or messages have waited for over a minute and nobody claims. Rates are those of `workers`.
        """
        return await run(lambda: self._of.status())
