"""The leases of a worker, and tracks: messages that must be handled one after the other."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from uuid import UUID

from custody.elapsed import elapsed
from custody.model.entities import Message
from custody.verbs.claim import Lease


@dataclass(eq=False)
class HeldLease:
    """A lease and its unsettled messages. Until `expires`, by this process's own clock, it is certainly valid. `full`:
    it had as many messages as were wanted, so there are probably more. `behind`: messages that follow one of their key
    which stopped it, so they leave the lease when that one is settled."""

    lease_id: UUID
    open: set[int]
    expires: float
    full: bool
    lost: bool = False
    behind: set[int] = field(default_factory=set)

    def lose(self, offsets: Collection[int]) -> None:
        """Marks these offsets as lost; without offsets, all."""
        self.open.difference_update(offsets or tuple(self.open))
        self.lost = not self.open

    def holds(self) -> bool:
        """False once it may have expired, so that another worker may have its messages."""
        return not self.lost and elapsed() < self.expires


@dataclass(eq=False)
class Track:
    """Messages of one lease that must be handled in this order: those of one key, or a single one."""

    lease: HeldLease
    messages: list[Message]


@dataclass(eq=False)
class Run:
    """One message in a handler. `given_up`: it timed out and was settled as failed, so its result is ignored."""

    lease: HeldLease
    message: Message
    thread: threading.Thread
    started: float = field(default_factory=time.monotonic)
    given_up: bool = False


def tracks(lease: HeldLease, messages: Iterable[Message], *, ordered: bool) -> list[Track]:
    """One track for each key in an ordered group; one for each message otherwise. In the order of the log."""
    if not ordered:
        return [Track(lease, [message]) for message in messages]
    by_key: dict[str, Track] = {}
    found: list[Track] = []
    for message in messages:
        if message.key is not None and message.key in by_key:
            by_key[message.key].messages.append(message)
            continue
        track = Track(lease, [message])
        found.append(track)
        if message.key is not None:
            by_key[message.key] = track
    return found


def held(lease: Lease, expires: float, *, wanted: int) -> HeldLease:
    return HeldLease(lease.lease_id, {message.offset for message in lease.messages}, expires, len(lease) >= wanted)
