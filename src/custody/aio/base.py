"""The base of every part of the asynchronous façade: the blocking one, whose verbs it runs on the event loop."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from custody.bridge import run
from custody.engine import Custody


class Base:
    """An open Custody, for the event loop that has opened it."""

    def __init__(self, of: Custody) -> None:
        self._of = of

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        return repr(self._of)

    @property
    def worker(self) -> str:
        """The name that the journal records as the actor."""
        return self._of.worker

    @property
    def database_url(self) -> str:
        """The libpq URL in use."""
        return self._of.database_url

    async def ping(self) -> None:
        """Raises if the database does not answer."""
        await run(lambda: self._of.ping())

    async def close(self) -> None:
        """Closes the connections; the last user of an embedded database stops its server."""
        await run(lambda: self._of.close())
