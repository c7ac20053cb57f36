"""Who shows a key: told from what was read of the database a few seconds ago, so that no attempt costs a call of it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

from custody.errors import CustodyError, Unauthorized
from custody.http.rights import ANYBODY, Caller
from custody.verbs.apikeys import ApiKey, Ring

logger = logging.getLogger(__name__)

FRESH = 5.0
"""Seconds after which what was read is not believed any more: so long a revoked key may go on."""
RENEWED = 2.5
"""Seconds after which a request has it read again, without waiting for it."""
AGAIN = 1.0
"""Seconds between two readings because of keys that nobody knows: a new key works at once, guessing costs one call."""
CLOSED = "every call is refused until there is a new key"
_REMEDY = "Send it as `Authorization: Bearer …`; `custody apikeys create` makes one."


class Keyring:
    """The keys of a server process. Lives in its event loop, and reads in a thread."""

    def __init__(
        self,
        read: Callable[[], Ring],
        *,
        required: bool,
        open: bool = False,
        in_thread: Callable[[Callable[[], Ring]], asyncio.Future[Ring]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read, self._required, self._in_thread, self._clock = read, required, in_thread, clock
        self._open = open
        self._ring, self._read_at = Ring(), float("-inf")
        self._callers: dict[str, Caller] = {}
        self._reading: asyncio.Future[Ring] | None = None

    def load(self) -> Ring:
        """Reads them now, before the server starts."""
        began = self._clock()
        self._take(self._read(), began)
        return self._ring

    @property
    def needed(self) -> bool:
        """Whether a call needs a key, by what was read last. The revocation of the last key opens nothing."""
        return self._required or bool(self._ring) or (self._ring.all_revoked and not self._open)

    async def caller(self, headers: Mapping[bytes, bytes], *, stale: bool = False) -> Caller:
        """Whose key these headers show; anybody, if none is needed. `stale`: what was read last will do, if need be."""
        age = self._clock() - self._read_at
        if age > FRESH:
            try:
                await self._renewed()
            except CustodyError:
                if not stale:
                    raise
        elif age > RENEWED:
            self._renew()
        if not self.needed:
            return ANYBODY
        shown = key_of(headers)
        if not shown:
            raise Unauthorized("this server asks for a key", _REMEDY)
        key = self._ring.find(shown)
        if key is None and self._clock() - self._read_at > AGAIN:
            await self._renewed()  # it may be new
            key = self._ring.find(shown)
        if key is None:
            raise Unauthorized("the key is not known, or was revoked, or has expired", _REMEDY)
        return self._caller(key)

    def _caller(self, key: ApiKey) -> Caller:
        caller = self._callers.get(key.key_id)
        if caller is None:
            rights = Caller(name=key.name, produce=key.produce, consume=key.consume, admin=key.admin)
            caller = self._callers[key.key_id] = rights
        return caller

    def _renew(self) -> asyncio.Future[Ring]:
        """One reading at a time, for all who want it."""
        if self._reading is None:
            began = self._clock()
            self._reading = self._in_thread(self._read)
            self._reading.add_done_callback(lambda reading: self._done(reading, began))
        return self._reading

    async def _renewed(self) -> None:
        # shielded: who goes away while waiting does not take it from the others
        await asyncio.shield(self._renew())

    def _done(self, reading: asyncio.Future[Ring], began: float) -> None:
        self._reading = None
        # what went wrong is told to those who wait for it; without anybody, the next request tries again
        if not reading.cancelled() and reading.exception() is None:
            self._take(reading.result(), began)

    def _take(self, ring: Ring, began: float) -> None:
        ended = ring.all_revoked and bool(self._ring)
        # as old as the beginning of the reading: what is revoked while it goes on may not be in it
        self._ring, self._read_at = ring, began
        if ended:
            logger.warning("the last API key was revoked: %s", CLOSED if self.needed else "no call needs one (--open)")
        self._callers.clear()


def key_of(headers: Mapping[bytes, bytes]) -> bytes:
    """The key in `Authorization: Bearer …` or `X-Api-Key`; empty if there is none."""
    given = headers.get(b"authorization")
    if given is None:
        return headers.get(b"x-api-key", b"").strip()
    scheme, _, key = given.partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else b""
