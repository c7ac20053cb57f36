"""The states that keyed pipelines keep for the keys of a group: look at them, and remove them."""

from __future__ import annotations

from typing import Annotated

import msgspec

from custody.engine.base import Base
from custody.engine.groups import GROUP
from custody.model.entities import StoredState
from custody.wire.answers import CountOut
from custody.wire.fields import Help, Page
from custody.wire.verb import verb


class KeyStates(Base):
    """The states of keys."""

    @verb("GET", GROUP + "/states", tag="groups", right="consume", answer=list[StoredState])
    def key_states(
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
        rows = self._rows("key_states", topic=topic, group=group, key=key, after=after, limit=limit)
        return [StoredState(**{**row, "state": msgspec.json.decode(row["state"])}) for row in rows]

    @verb(
        "POST",
        GROUP + "/states/delete",
        tag="groups",
        right="admin",
        answer=CountOut,
        example={"key": "SKU-123"},
    )
    def delete_key_states(
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
        return int(self._value("delete_key_states", topic=topic, group=group, key=key, every=every))
