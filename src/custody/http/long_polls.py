"""Long polls: all callers that wait for the same group and partition are one line. Waiting costs neither a thread nor a
connection: one claim serves as many as it can, and an empty one is empty for everybody in the line."""

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
"""So many of a line are served by one transaction."""
POLL = 1.0
POLLS_A_SECOND = 200
"""All lines together: the more there are, the less often each looks without a hint."""
BUSY = 0.03
SOON = 0.005
"""The shortest pause before something that is due."""


class Place(NamedTuple):
    """What a line waits for; without a partition, any. `create`: the default group is made if it is not there."""

    topic: str
    group: str
    partition: int | None
    create: bool = True


class ServerClaims(Protocol):
    """What a line needs of the server: claims and due times, each in a thread."""

    async def claim(self, place: Place, callers: Sequence[Claim]) -> list[Lease]: ...
    async def next_due(self, place: Place) -> float | None: ...
    async def give_back(self, lease: Lease) -> None: ...


class Waiter:
    """One caller in a line. `answer` becomes a lease: an empty one when its time is over."""

    def __init__(self, claim: Claim, answer: asyncio.Future[Lease], *, patient: bool) -> None:
        self.claim, self.answer, self.patient = claim, answer, patient
        self.seen: Lease | None = None
        """The last empty answer: why there is nothing."""


class WaitingLine:
    """The callers that wait at one place: served when somebody arrives, on a hint, when something is due, and now and
    then."""

    def __init__(
        self, place: Place, claims: ServerClaims, interval: Callable[[], float], emptied: Callable[[WaitingLine], None]
    ) -> None:
        self.place, self._claims, self._interval, self._emptied = place, claims, interval, emptied
        self.waiters: list[Waiter] = []
        self.serving: asyncio.Task[None] | None = None
        self._news = False
        self._timer: asyncio.TimerHandle | None = None
        self._overdue = 0.0
        """The last pause, if something was overdue that a claim did not get."""

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
        self._news = True
        if self.serving is None and self.waiters:
            self.serving = asyncio.get_running_loop().create_task(self._serve())
            self.serving.add_done_callback(self._served)

    def _served(self, task: asyncio.Task[None]) -> None:
        self.serving = None
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("serving those who wait for %s failed", self.place, exc_info=error)
            for waiter in list(self.waiters):
                self._hand(waiter, error)
        if self._news and self.waiters:
            self.wake()
        elif not self.waiters:
            self._emptied(self)

    async def _serve(self) -> None:
        pause = POLL
        while self.waiters and self._news:
            self._news = False
            present = list(self.waiters)
            served = present[:AT_ONCE]
            try:
                leases = await self._claims.claim(self.place, [waiter.claim for waiter in served])
            except Transient as error:
                logger.debug("nobody who waits for %s was served: %s", self.place, error)
                for waiter in list(self.waiters):
                    if waiter in served or not waiter.patient:
                        self._hand(waiter, error)
                break
            except CustodyError as error:  # no topic, no group: of no use to wait
                for waiter in list(self.waiters):
                    self._hand(waiter, error)
                return
            await self._hand_out(served, leases)
            last = leases[-1]
            if last:  # each of them got something: there may be more
                self._news, self._overdue = True, 0.0
                continue
            for waiter in present:  # not whoever came since: the claim may have been before their own publish
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

        What is overdue just after a claim is held by somebody, such as an expired lease that is being settled in an
        open transaction: it is looked for less and less often.
        """
        try:
            due = await self._claims.next_due(self.place)
        except Transient as error:
            logger.debug("when something is due for %s is not known: %s", self.place, error)
            return self._interval()
        if due is not None and due <= 0:
            self._overdue = min(self._interval(), max(SOON, 2 * self._overdue))
            return self._overdue
        self._overdue = 0.0
        return self._interval() if due is None else max(SOON, min(self._interval(), due))

    async def _hand_out(self, served: Sequence[Waiter], leases: Sequence[Lease]) -> None:
        """To each what was claimed for it; what was for one who has gone meanwhile is given back."""
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
        """How many wait."""
        return len(self._waiting)

    async def receive(self, place: Place, claim: Claim, wait: float) -> Lease:
        """A lease for this caller, as soon as there is something to give; an empty one after `wait` seconds."""
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
        """The caller went away just when there was something for it."""
        answer = waiter.answer
        if answer.done() and not answer.cancelled() and answer.exception() is None and answer.result():
            await self._claims.give_back(answer.result())

    async def served(self, timeout: float) -> None:
        """Waits for the claims that are under way, and for what becomes of them."""
        under_way = [line.serving for line in self._lines.values() if line.serving is not None]
        if under_way:
            await asyncio.wait(under_way, timeout=timeout)

    async def _once(self, line: WaitingLine, waiter: Waiter) -> Lease:
        """For whoever does not want to wait: served with the line, or told that there is nothing."""
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
        """If nobody is in it any more."""
        if not line.waiters and line.serving is None and self._lines.get(line.place) is line:
            del self._lines[line.place]

    def _over(self, line: WaitingLine, waiter: Waiter) -> None:
        if waiter.answer.done():
            return
        if waiter.seen is None:  # its first claim is under way: whatever that brings is its answer
            waiter.patient = False
        else:
            line.leave(waiter)
            waiter.answer.set_result(waiter.seen)

    def _interval(self) -> float:
        return max(POLL, len(self._lines) / POLLS_A_SECOND)

    def wake(self, topic: str | None) -> None:
        """There is news of a topic; None: perhaps of any."""
        for place, line in list(self._lines.items()):
            if topic is None or place.topic == topic:
                line.wake()

    def close(self) -> None:
        """Ends all waiting: everybody is told that there is nothing."""
        self._closed = True
        for line in list(self._lines.values()):
            for waiter in list(line.waiters):
                self._over(line, waiter)
