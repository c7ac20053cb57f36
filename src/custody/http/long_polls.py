"""Long polls: all callers that wait for the same group and partition form one line. Waiting needs neither a thread nor
a connection: one claim serves as many callers as it can, and if it finds nothing, that holds for the whole line."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from custody.coalesced import Claim
from custody.errors import CustodyError, Transient
from custody.verbs.claim import Lease

logger = logging.getLogger(__name__)

AT_ONCE = 32
"""Most callers of a line that one transaction serves."""
POLL = 1.0
"""Seconds between two claims of a line without a wake-up."""
POLLS_A_SECOND = 200
"""Limit of all lines together: the more lines there are, the less often each claims without a wake-up."""
BUSY = 0.03
"""Longest pause in seconds after a claim that was `busy`."""
SOON = 0.005
"""Shortest pause in seconds before a message is due."""


class Place(NamedTuple):
    """What a line waits for; without a partition, any. `create`: create the default group if it is missing."""

    topic: str
    group: str
    partition: int | None
    create: bool = True


class ServerClaims(Protocol):
    """What a line needs of the server; each call runs in a thread."""

    async def claim(self, place: Place, callers: Sequence[Claim]) -> list[Lease]: ...
    async def next_due(self, place: Place) -> float | None: ...
    async def give_back(self, lease: Lease) -> None: ...


class Waiter:
    """One caller in a line. `answer` gets a lease, an empty one at the timeout. Without `patient` it does not wait."""

    def __init__(self, claim: Claim, answer: asyncio.Future[Lease], *, patient: bool) -> None:
        self.claim, self.answer, self.patient = claim, answer, patient
        self.seen: Lease | None = None
        """The last empty lease, with the reason."""


class WaitingLine:
    """The callers that wait for one place. A claim is made when one arrives, on a wake-up, when a message is due, and
    at intervals."""

    def __init__(
        self, place: Place, claims: ServerClaims, interval: Callable[[], float], emptied: Callable[[WaitingLine], None]
    ) -> None:
        self.place, self._claims, self._interval, self._emptied = place, claims, interval, emptied
        self.waiters: list[Waiter] = []
        self.serving: asyncio.Task[None] | None = None
        self._woken = False
        self._timer: asyncio.TimerHandle | None = None
        self._overdue = 0.0
        """The last pause, if something is overdue although a claim did not get it."""

    def join(self, waiter: Waiter) -> None:
        self.waiters.append(waiter)
        self.wake()

    def leave(self, waiter: Waiter) -> None:
        if waiter in self.waiters:
            self.waiters.remove(waiter)
        if not self.waiters and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def wake(self) -> None:
        self._woken = True
        if self.serving is None and self.waiters:
            self.serving = asyncio.get_running_loop().create_task(self._serve())
            self.serving.add_done_callback(self._served)

    def _served(self, task: asyncio.Task[None]) -> None:
        self.serving = None
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("serving long polls for %s failed", self.place, exc_info=error)
            for waiter in list(self.waiters):
                self._hand(waiter, error)
        if self._woken and self.waiters:
            self.wake()
        elif not self.waiters:
            self._emptied(self)

    async def _serve(self) -> None:
        pause = POLL
        while self.waiters and self._woken:
            self._woken = False
            present = list(self.waiters)
            served = present[:AT_ONCE]
            try:
                leases = await self._claims.claim(self.place, [waiter.claim for waiter in served])
            except Transient as error:
                logger.debug("no long poll for %s was served: %s", self.place, error)
                for waiter in list(self.waiters):
                    if waiter in served or not waiter.patient:
                        self._hand(waiter, error)
                break
            except CustodyError as error:  # the topic or group does not exist: waiting is useless
                for waiter in list(self.waiters):
                    self._hand(waiter, error)
                return
            await self._hand_out(served, leases)
            last = leases[-1]
            if last:  # each of them got something: there may be more
                self._woken, self._overdue = True, 0.0
                continue
            for waiter in present:  # not those that arrived since: they may have published after this claim
                waiter.seen = last
                if not waiter.patient:
                    self._hand(waiter, last)
            if last.reason == "busy":
                pause = 0.0 if last.detail is not None else random.uniform(0.002, BUSY)
            elif self.waiters:
                pause = await self._until_due()
        self._wake_after(pause)

    async def _until_due(self) -> float:
        """How long to wait before the next claim.

        If something is overdue just after a claim, a lock keeps it back: for example an expired lease that is being
        settled in an open transaction. The pause doubles each time then.
        """
        try:
            due = await self._claims.next_due(self.place)
        except Transient as error:
            logger.debug("the next due time of %s is not known: %s", self.place, error)
            return self._interval()
        if due is not None and due <= 0:
            self._overdue = min(self._interval(), max(SOON, 2 * self._overdue))
            return self._overdue
        self._overdue = 0.0
        return self._interval() if due is None else max(SOON, min(self._interval(), due))

    async def _hand_out(self, served: Sequence[Waiter], leases: Sequence[Lease]) -> None:
        """Answers each caller with its lease, and gives back leases of callers that have disconnected."""
        for_nobody = []
        for waiter, lease in zip(served, leases, strict=False):
            if lease and waiter.answer.done():
                for_nobody.append(lease)
            elif lease:
                self._hand(waiter, lease)
        for lease in for_nobody:
            await self._claims.give_back(lease)

    def _hand(self, waiter: Waiter, answer: Lease | BaseException) -> None:
        self.leave(waiter)
        if waiter.answer.done():
            return
        if isinstance(answer, BaseException):
            waiter.answer.set_exception(answer)
        else:
            waiter.answer.set_result(answer)

    def _wake_after(self, pause: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(pause, self.wake) if self.waiters else None


class LongPolls:
    """All lines of a server."""

    def __init__(self, claims: ServerClaims) -> None:
        self._claims = claims
        self._lines: dict[Place, WaitingLine] = {}
        self._waiting: set[Waiter] = set()
        self._closed = False

    def __len__(self) -> int:
        """How many callers wait."""
        return len(self._waiting)

    async def receive(self, place: Place, claim: Claim, wait: float) -> Lease:
        """A lease for this caller as soon as there are messages; an empty one after `wait` seconds."""
        loop = asyncio.get_running_loop()
        waiter = Waiter(claim, loop.create_future(), patient=wait > 0 and not self._closed)
        line = self._lines.get(place)
        if line is None:
            line = self._lines[place] = WaitingLine(place, self._claims, self._interval, self._forget)
        if not waiter.patient:
            return await self._once(line, waiter)
        self._waiting.add(waiter)
        over = loop.call_later(wait, self._over, line, waiter)
        try:
            line.join(waiter)
            return await waiter.answer
        except asyncio.CancelledError:
            await self._return_answer(waiter)
            raise
        finally:
            over.cancel()
            self._waiting.discard(waiter)
            waiter.answer.cancel()
            line.leave(waiter)
            self._forget(line)

    async def _return_answer(self, waiter: Waiter) -> None:
        """Gives back the lease of a caller that disconnected when it was just claimed."""
        answer = waiter.answer
        if answer.done() and not answer.cancelled() and answer.exception() is None and answer.result():
            await self._claims.give_back(answer.result())

    async def served(self, timeout: float) -> None:
        """Waits until running claims have answered their callers."""
        under_way = [line.serving for line in self._lines.values() if line.serving is not None]
        if under_way:
            await asyncio.wait(under_way, timeout=timeout)

    async def _once(self, line: WaitingLine, waiter: Waiter) -> Lease:
        """For a caller that does not wait: joins the line for one claim."""
        line.join(waiter)
        try:
            return await waiter.answer
        except asyncio.CancelledError:
            await self._return_answer(waiter)
            raise
        finally:
            waiter.answer.cancel()
            line.leave(waiter)
            self._forget(line)

    def _forget(self, line: WaitingLine) -> None:
        """Removes a line if nobody is in it any more."""
        if not line.waiters and line.serving is None and self._lines.get(line.place) is line:
            del self._lines[line.place]

    def _over(self, line: WaitingLine, waiter: Waiter) -> None:
        if waiter.answer.done():
            return
        if waiter.seen is None:  # its first claim is under way: the result of that is its answer
            waiter.patient = False
        else:
            line.leave(waiter)
            waiter.answer.set_result(waiter.seen)

    def _interval(self) -> float:
        return max(POLL, len(self._lines) / POLLS_A_SECOND)

    def wake(self, topic: str | None) -> None:
        """Something was published in a topic; None: perhaps in any of them."""
        for place, line in list(self._lines.items()):
            if topic is None or place.topic == topic:
                line.wake()

    def close(self) -> None:
        """Ends all waits: every caller gets an empty lease."""
        self._closed = True
        for line in list(self._lines.values()):
            for waiter in list(line.waiters):
                self._over(line, waiter)
