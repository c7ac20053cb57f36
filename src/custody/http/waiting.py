"""Long polls: whoever waits for messages of a group stands in line at its desk. Waiting costs neither a thread nor a
connection: one claim serves as many as it can, and an empty one is empty for everybody in the line."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from custody.claim import Lease
from custody.errors import CustodyError, Transient
from custody.together import Claim

logger = logging.getLogger(__name__)

AT_ONCE = 32
"""So many of a line are served by one transaction."""
POLL = 1.0
POLLS_A_SECOND = 200
"""All desks together: the more there are, the less often each looks without a hint."""
BUSY = 0.03
SOON = 0.005
"""The shortest pause before something that is due."""


class Place(NamedTuple):
    """What a line waits for; without a partition, any."""

    topic: str
    group: str
    partition: int | None


class Clerk(Protocol):
    """What a desk needs: claims and due times, each in a thread of the server."""

    async def claim(self, place: Place, callers: Sequence[Claim]) -> list[Lease]: ...
    async def next_due(self, place: Place) -> float | None: ...
    async def give_back(self, lease: Lease) -> None: ...


class Waiter:
    """One caller in a line. `answer` becomes a lease: an empty one when its time is over."""

    def __init__(self, claim: Claim, answer: asyncio.Future[Lease], *, patient: bool) -> None:
        self.claim, self.answer, self.patient = claim, answer, patient
        self.seen: Lease | None = None
        """The last empty answer: why there is nothing."""


class Desk:
    """The line of one place. It is served when somebody arrives, on a hint, when something is due, and now and then."""

    def __init__(
        self, place: Place, clerk: Clerk, interval: Callable[[], float], deserted: Callable[[Desk], None]
    ) -> None:
        self.place, self._clerk, self._interval, self._deserted = place, clerk, interval, deserted
        self.line: list[Waiter] = []
        self.serving: asyncio.Task[None] | None = None
        self._news = False
        self._timer: asyncio.TimerHandle | None = None
        self._overdue = 0.0
        """The last pause, if something was overdue that a claim did not get."""

    def stand(self, waiter: Waiter) -> None:
        self.line.append(waiter)
        self.wake()

    def leave(self, waiter: Waiter) -> None:
        if waiter in self.line:
            self.line.remove(waiter)
        if not self.line and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def wake(self) -> None:
        self._news = True
        if self.serving is None and self.line:
            self.serving = asyncio.get_running_loop().create_task(self._serve())
            self.serving.add_done_callback(self._served)

    def _served(self, task: asyncio.Task[None]) -> None:
        self.serving = None
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("serving those who wait for %s failed", self.place, exc_info=error)
            for waiter in list(self.line):
                self._hand(waiter, error)
        if self._news and self.line:
            self.wake()
        elif not self.line:
            self._deserted(self)

    async def _serve(self) -> None:
        pause = POLL
        while self.line and self._news:
            self._news = False
            present = list(self.line)
            served = present[:AT_ONCE]
            try:
                leases = await self._clerk.claim(self.place, [waiter.claim for waiter in served])
            except Transient as error:
                logger.debug("nobody was served at %s: %s", self.place, error)
                for waiter in list(self.line):
                    if waiter in served or not waiter.patient:
                        self._hand(waiter, error)
                break
            except CustodyError as error:  # no topic, no group: of no use to wait
                for waiter in list(self.line):
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
            elif self.line:
                pause = await self._until_due()
        self._wake_after(pause)

    async def _until_due(self) -> float:
        """How long to wait before the next claim.

        What is overdue just after a claim is held by somebody, such as an expired lease that is being settled in an
        open transaction: it is looked for less and less often.
        """
        try:
            due = await self._clerk.next_due(self.place)
        except Transient as error:
            logger.debug("when something is due at %s is not known: %s", self.place, error)
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
            await self._clerk.give_back(lease)

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
        self._timer = asyncio.get_running_loop().call_later(pause, self.wake) if self.line else None


class Desks:
    """All lines of a server."""

    def __init__(self, clerk: Clerk) -> None:
        self._clerk = clerk
        self._desks: dict[Place, Desk] = {}
        self._waiting: set[Waiter] = set()
        self._closed = False

    def __len__(self) -> int:
        """How many wait."""
        return len(self._waiting)

    async def receive(self, place: Place, claim: Claim, wait: float) -> Lease:
        """A lease for this caller, as soon as there is something to give; an empty one after `wait` seconds."""
        loop = asyncio.get_running_loop()
        waiter = Waiter(claim, loop.create_future(), patient=wait > 0 and not self._closed)
        desk = self._desks.get(place)
        if desk is None:
            desk = self._desks[place] = Desk(place, self._clerk, self._interval, self._deserted)
        if not waiter.patient:
            return await self._once(desk, waiter)
        self._waiting.add(waiter)
        over = loop.call_later(wait, self._over, desk, waiter)
        try:
            desk.stand(waiter)
            return await waiter.answer
        except asyncio.CancelledError:
            await self._return_answer(waiter)
            raise
        finally:
            over.cancel()
            self._waiting.discard(waiter)
            waiter.answer.cancel()
            desk.leave(waiter)
            self._deserted(desk)

    async def _return_answer(self, waiter: Waiter) -> None:
        """The caller went away just when there was something for it."""
        answer = waiter.answer
        if answer.done() and not answer.cancelled() and answer.exception() is None and answer.result():
            await self._clerk.give_back(answer.result())

    async def served(self, timeout: float) -> None:
        """Waits for the claims that are under way, and for what becomes of them."""
        under_way = [desk.serving for desk in self._desks.values() if desk.serving is not None]
        if under_way:
            await asyncio.wait(under_way, timeout=timeout)

    async def _once(self, desk: Desk, waiter: Waiter) -> Lease:
        """For whoever does not want to wait: served with the line, or told that there is nothing."""
        desk.stand(waiter)
        try:
            return await waiter.answer
        except asyncio.CancelledError:
            await self._return_answer(waiter)
            raise
        finally:
            waiter.answer.cancel()
            desk.leave(waiter)
            self._deserted(desk)

    def _deserted(self, desk: Desk) -> None:
        """Nobody stands there any more."""
        if not desk.line and desk.serving is None and self._desks.get(desk.place) is desk:
            del self._desks[desk.place]

    def _over(self, desk: Desk, waiter: Waiter) -> None:
        if waiter.answer.done():
            return
        if waiter.seen is None:  # its first claim is under way: whatever that brings is its answer
            waiter.patient = False
        else:
            desk.leave(waiter)
            waiter.answer.set_result(waiter.seen)

    def _interval(self) -> float:
        return max(POLL, len(self._desks) / POLLS_A_SECOND)

    def wake(self, topic: str | None) -> None:
        """There is news of a topic; None: perhaps of any."""
        for place, desk in list(self._desks.items()):
            if topic is None or place.topic == topic:
                desk.wake()

    def close(self) -> None:
        """Ends all waiting: everybody is told that there is nothing."""
        self._closed = True
        for desk in list(self._desks.values()):
            for waiter in list(desk.line):
                self._over(desk, waiter)
