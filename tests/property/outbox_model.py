"""What an outbox should do, in plain Python: events, what is due of them, and what a key has to wait for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID

from custody.outbox import EventState

OPEN = (EventState.PENDING, EventState.CLAIMED)
UNORDERED = "c"


@dataclass
class Modelled:
    """An event as the model knows it, with what the table should say of it."""

    id: int
    n: int
    key: str | None  # without one it has a partition_key: a place by chance could not be played again
    partition: int | None  # of the topic; None: the relay's
    available_at: datetime
    ages_from: datetime
    status: EventState = EventState.PENDING
    attempts: int = 0
    failures: int = 0
    claim: str | None = None
    expires_at: datetime | None = None
    ended_at: datetime | None = None
    replays: int = 0
    claimed_with: int | None = None
    suspect: int | None = None
    crashes: int = 0

    @property
    def size(self) -> int | None:
        """How many suspects it may be claimed with; of one whose claim has expired, how many after that."""
        return self.suspect if self.claimed_with is None else max(1, self.claimed_with // 10)

    def become(self, status: EventState, now: datetime) -> None:
        assert self.status.may_become(status), f"{self.status} to {status}"
        self.status, self.claim, self.expires_at, self.claimed_with = status, None, None, None
        self.ended_at = None if status in OPEN else now


class Model:
    """The events in the order of their ids, and the partitions of the topic that some of them go to.

    `hold`: for relays a dead event holds its key; past `max_age` they give an event up.
    """

    def __init__(
        self,
        clock: Callable[[], datetime],
        *,
        hold: bool,
        max_age: timedelta | None,
        retry_for: timedelta,
        max_attempts: int,
    ) -> None:
        self.retry_for = retry_for
        self.clock, self.hold, self.max_age, self.max_attempts = clock, hold, max_age, max_attempts
        self.events: dict[UUID, Modelled] = {}
        self.log: dict[int, list[tuple[str, int]]] = {0: [], 1: []}

    def first_of_key(self, event: Modelled) -> Modelled:
        """The earliest event of the same key and destination that holds it."""
        same = (
            other
            for other in self.events.values()
            if event.key is not None and self.holds_key(other)
            and (other.key, other.partition is None) == (event.key, event.partition is None)
        )  # fmt: skip
        return next(same, event)

    def holds_key(self, event: Modelled) -> bool:
        """Whether later events of its key wait for it."""
        return event.status in OPEN or (self.hold and event.partition is None and event.status is EventState.DEAD)

    def too_old(self, event: Modelled) -> bool:
        return self.max_age is not None and event.ages_from <= self.clock() - self.max_age

    def retried(self, event: Modelled) -> bool:
        """Whether it has been tried for long enough to die of failures."""
        return event.ages_from <= self.clock() - self.retry_for

    def expired(self, event: Modelled) -> bool:
        return event.expires_at is not None and event.expires_at <= self.clock()

    def due(self, event: Modelled) -> bool:
        return (event.status is EventState.PENDING or self.expired(event)) and event.available_at <= self.clock()

    def ready(self, event: Modelled) -> bool:
        """For a relay: due, and its key's first event is, or is dead."""
        first = self.first_of_key(event)
        waits = (first.status is EventState.CLAIMED and not self.expired(first)) or first.available_at > self.clock()
        return event.partition is None and self.due(event) and not waits

    def dies(self, event: Modelled) -> bool:
        """Whether its claim, which has expired, was its last one."""
        return self.expired(event) and event.suspect == 1 and event.crashes + 1 >= self.max_attempts

    def expire(self, event: Modelled) -> None:
        dead, size = self.dies(event), event.size
        event.attempts += 1
        event.crashes += event.suspect == 1
        event.become(EventState.DEAD if dead else EventState.PENDING, self.clock())
        event.suspect = size

    def apart(self, wanted: list[UUID], alone: bool) -> list[UUID]:
        """Suspects and others are not claimed together, nor more suspects than one of them may be with."""
        left = [i for i in wanted if alone or self.events[i].size != 1]
        if not left or self.events[left[0]].size is None:
            return [i for i in left if self.events[i].size is None]
        taken: list[UUID] = []
        most = len(left)
        for event_id in left:
            size = self.events[event_id].size
            if size is not None:
                most = min(most, size)
                if len(taken) >= most:
                    break
                taken.append(event_id)
        return taken

    def move(self, partition: int) -> int:
        """What is due for a partition goes into the log, a key only as far as nothing of it has to wait."""
        moved = 0
        for event in self.events.values():
            if event.partition == partition and self.due(event) and self.first_of_key(event) is event:
                event.status = EventState.CLAIMED
                event.become(EventState.PUBLISHED, self.clock())
                self.log[partition].append((event.key or UNORDERED, event.n))
                moved += 1
        return moved

    def nothing_before(self, event_id: UUID, among: list[UUID]) -> bool:
        """Whether all earlier events that hold its key are among these."""
        event = self.events[event_id]
        return event.key is None or all(
            other_id in among
            for other_id, other in self.events.items()
            if self.holds_key(other) and other.id < event.id and other.partition is None and other.key == event.key
        )

    def holds(self, claim: str, event_id: UUID) -> bool:
        event = self.events.get(event_id)
        return (
            event is not None
            and event.claim == claim
            and event.expires_at is not None
            and event.expires_at > self.clock()
        )
