"""`KeyStates` of engine/key_states.py for asyncio. Made by scripts/async_surface.py: do not edit."""

from __future__ import annotations

from typing import Annotated

from custody.aio.base import Base
from custody.bridge import run
from custody.model.entities import StoredState
from custody.wire.fields import Help, Page


class KeyStates(Base):
    """The states of keys."""

    async def key_states(
        self,
        topic: str,
        group: str,
        *,
        key: Annotated[str | None, Help("Only the state of this key.")] = None,
        after: Annotated[str | None, Help("Only keys after this one, for the next page.", "KEY")] = None,
        limit: Page = 1000,
    ) -> list[StoredState]:
        """The states that a keyed pipeline keeps for the keys of this group.

        They are ordered by key. Those that have expired are left out.
        """
        return await run(lambda: self._of.key_states(topic, group, key=key, after=after, limit=limit))

    async def delete_key_states(
        self,
        topic: str,
        group: str,
        *,
        key: Annotated[str | None, Help("The key whose state is removed.")] = None,
        every: Annotated[bool, Help("Remove the states of all keys.")] = False,
    ) -> int:
        """Removes the state of a key, or of every key: its next message finds none.

        Returns how many there were. A batch that runs meanwhile is run again, without them.
        """
        return await run(lambda: self._of.delete_key_states(topic, group, key=key, every=every))
