"""Functions of verbs/once.py for asyncio. Made by scripts/async_surface.py: do not edit."""

from __future__ import annotations

from typing import Any

from custody.bridge import run
from custody.model.entities import Message
from custody.model.policy import Duration
from custody.verbs.once import forget_once as blocking_forget_once
from custody.verbs.once import once as blocking_once


async def once(connection: Any, group: str, message: Message) -> bool:
    """Records in the transaction that this group processes the message. False if it had processed it before.

    Waits for another open transaction that is processing the same message. The record is the table `custody_once` in
    the connection's database, which is created if it is missing. A topic that was deleted and created again has new
    messages. A group is identified by its name: if it was created again, or rewound, its records still count.
    """
    return await run(lambda: blocking_once(connection, group, message))


async def forget_once(connection: Any, *, older_than: Duration, group: str | None = None) -> int:
    """Removes old records of one group or of all. Returns how many. A message that is redelivered later counts as
    new."""
    return await run(lambda: blocking_forget_once(connection, older_than=older_than, group=group))
