"""`Schedules` of engine/schedules.py for asyncio. Made by scripts/async_surface.py: do not edit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from msgspec import UNSET, UnsetType

from custody.aio.base import Base
from custody.bridge import run
from custody.engine.schedules import Cron, Destination, Every, GivenHeaders, GivenPayload, Key, MissedTicks, Zone
from custody.model.entities import Payload, Receipt
from custody.model.policy import Duration
from custody.model.schedule import Missed, Schedule
from custody.wire.fields import Help, Name, NewName, Reason


class Schedules(Base):
    """Schedules and their ticks."""

    async def schedules(self) -> list[Schedule]:
        """All schedules: when each is due next, and what is wrong with it."""
        return await run(lambda: self._of.schedules())

    async def schedule(self, name: str) -> Schedule:
        """One schedule with all its settings."""
        return await run(lambda: self._of.schedule(name))

    async def create_schedule(
        self,
        name: NewName,
        *,
        topic: Destination,
        every: Every | None = None,
        cron: Cron = None,
        tz: Zone = "UTC",
        missed: MissedTicks = "skip",
        payload: GivenPayload = None,
        key: Key | None = None,
        headers: GivenHeaders | None = None,
        app: Name | None = None,
    ) -> Schedule:
        """Creates a schedule, which publishes a message at its times.

        With `every` the first one is due after one interval. Of ticks that were missed, while no worker and no server
        ran, `skip` publishes only the newest, and `catch_up` all of them.
        """
        return await run(
            lambda: self._of.create_schedule(
                name,
                topic=topic,
                every=every,
                cron=cron,
                tz=tz,
                missed=missed,
                payload=payload,
                key=key,
                headers=headers,
                app=app,
            )
        )

    async def change_schedule(
        self,
        name: str,
        *,
        topic: Destination | UnsetType = UNSET,
        every: Every | UnsetType | None = UNSET,
        cron: Cron | UnsetType = UNSET,
        tz: Zone | UnsetType = UNSET,
        missed: MissedTicks | UnsetType = UNSET,
        payload: GivenPayload | UnsetType = UNSET,
        key: Key | UnsetType | None = UNSET,
        headers: GivenHeaders | UnsetType | None = UNSET,
        app: Name | None = None,
        declare: Annotated[bool, Help("A program declares it; otherwise an operator edits it.")] = False,
    ) -> Schedule:
        """Changes the given settings. `every` replaces cron, and cron replaces `every`.

        If its times change, the next tick is due at the first of the new times after now. Then those that were missed
        are not published.
        """
        return await run(
            lambda: self._of.change_schedule(
                name,
                topic=topic,
                every=every,
                cron=cron,
                tz=tz,
                missed=missed,
                payload=payload,
                key=key,
                headers=headers,
                app=app,
                declare=declare,
            )
        )

    async def ensure_schedule(
        self,
        name: str,
        *,
        topic: str,
        every: Duration | None = None,
        cron: str | None = None,
        tz: str = "UTC",
        missed: Missed = "skip",
        payload: Payload = None,
        key: str | None = None,
        headers: Mapping[str, str] | None = None,
        app: str | None = None,
    ) -> Schedule:
        """Creates a schedule, or changes it if a program declares something else than the last time.

        So what an operator has edited since stays, until the code changes.
        """
        return await run(
            lambda: self._of.ensure_schedule(
                name,
                topic=topic,
                every=every,
                cron=cron,
                tz=tz,
                missed=missed,
                payload=payload,
                key=key,
                headers=headers,
                app=app,
            )
        )

    async def pause_schedule(self, name: str, *, reason: Reason = None) -> bool:
        """Publishes no more ticks of a schedule until it is resumed.

        False if it was already paused.
        """
        return await run(lambda: self._of.pause_schedule(name, reason=reason))

    async def resume_schedule(self, name: str) -> bool:
        """Ends the pause of a schedule. What was due during it is not published.

        False if it was not paused.
        """
        return await run(lambda: self._of.resume_schedule(name))

    async def run_schedule(self, name: str) -> Receipt:
        """Publishes the message of a schedule now, also while it is paused. Its times stay as they are."""
        return await run(lambda: self._of.run_schedule(name))

    async def delete_schedule(self, name: str) -> None:
        """Deletes a schedule. Its topic and the messages stay."""
        return await run(lambda: self._of.delete_schedule(name))

    async def attend_schedules(self, app: Name, names: list[Name]) -> list[str]:
        """Records that a process of the app runs, with code for these schedules. It is valid for two minutes.

        Returns the schedules of the app that are not named: nobody handles their ticks.
        """
        return await run(lambda: self._of.attend_schedules(app, names))
