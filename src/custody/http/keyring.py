"""Authenticates callers by their keys. Keys are cached for a few seconds, so that attempts cost no database call."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

from custody.errors import CustodyError, Unauthorized
from custody.http.rights import ANYBODY, Caller
from custody.verbs.apikeys import ApiKey, KnownKeys

logger = logging.getLogger(__name__)

FRESH = 5.0
"""Seconds for which cached keys are valid: a revoked key may still work for that long."""
RENEWED = 2.5
"""Seconds after which a request triggers a refresh of the cache, without waiting for it."""
AGAIN = 1.0
"""Seconds between refreshes because of unknown keys: a new key works at once, and guessing costs one call a second."""
CLOSED = "every call is refused until there is a new key"
_REMEDY = "Send it as `Authorization: Bearer …`; `custody apikeys create` makes one."


class Keyring:
    """The keys of a server process. Used in its event loop; reads them in a thread."""

    def __init__(
        self,
        read: Callable[[], KnownKeys],
        *,
        required: bool,
        open: bool = False,
        in_thread: Callable[[Callable[[], KnownKeys]], asyncio.Future[KnownKeys]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read, self._required, self._in_thread, self._clock = read, required, in_thread, clock
        self._open = open
        self._ring, self._read_at = KnownKeys(), float("-inf")
        self._callers: dict[str, Caller] = {}
        self._reading: asyncio.Future[KnownKeys] | None = None

    def load(self) -> KnownKeys:
        """Reads the keys now, before the server starts."""
        began = self._clock()
        self._take(self._read(), began)
        return self._ring

    @property
    def needed(self) -> bool:
        """Whether a call needs a key, as of the last read. Revoking the last key does not open the server."""
        return self._required or bool(self._ring) or (self._ring.all_revoked and not self._open)

    async def caller(self, headers: Mapping[bytes, bytes], *, stale: bool = False) -> Caller:
        """The caller with the key in these headers; ANYBODY if none is needed. `stale`: an outdated cache will do."""
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
            raise Unauthorized("this server needs an API key", _REMEDY)
        key = self._ring.find(shown)
        if key is None and self._clock() - self._read_at > AGAIN:
            await self._renewed()  # the key may be new
            key = self._ring.find(shown)
        if key is None:
            raise Unauthorized("the API key is unknown, revoked or expired", _REMEDY)
        return self._caller(key)

    def _caller(self, key: ApiKey) -> Caller:
        caller = self._callers.get(key.key_id)
        if caller is None:
            rights = Caller(name=key.name, produce=key.produce, consume=key.consume, admin=key.admin)
            caller = self._callers[key.key_id] = rights
        return caller

    def _renew(self) -> asyncio.Future[KnownKeys]:
        """Starts a refresh, unless one is under way. All callers share it."""
        if self._reading is None:
            began = self._clock()
            self._reading = self._in_thread(self._read)
            self._reading.add_done_callback(lambda reading: self._done(reading, began))
        return self._reading

    async def _renewed(self) -> None:
        # shielded, because others may wait for it when this caller is cancelled
        await asyncio.shield(self._renew())

    def _done(self, reading: asyncio.Future[KnownKeys], began: float) -> None:
        self._reading = None
        # those who wait get the exception; if nobody does, the next request tries again
        if not reading.cancelled() and reading.exception() is None:
            self._take(reading.result(), began)

    def _take(self, ring: KnownKeys, began: float) -> None:
        ended = ring.all_revoked and bool(self._ring)
        # dated from its start: a key that is revoked during the read may still be in it
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
