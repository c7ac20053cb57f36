"""The base of every part of the façade: the database, the clock, and wake-ups of those who wait."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any

from custody.bridge import bridged, outside
from custody.config import this_process
from custody.engine.sharing import SharedCommits
from custody.model.bounds import Bounded
from custody.model.codec import Decoding, decode
from custody.model.placement import Layout
from custody.model.policy import Policy
from custody.store.async_notify import AsyncHints, AsyncListening
from custody.store.embedded import EmbeddedServer
from custody.store.notify import Hints, Listening
from custody.store.postgres import Connection, Database


class Base(Bounded):
    """An open database, the clock, and the name that the journal records as the actor."""

    _shared: SharedCommits | None = None

    def __init__(
        self,
        db: Database,
        *,
        server: EmbeddedServer | None = None,
        defaults: Policy | None = None,
        worker: str | None = None,
        clock: Callable[[], datetime] | None = None,
        listen_url: str | None = None,
        share_commits: bool = False,
    ) -> None:
        self.worker = worker or this_process()
        self._db = db.acting(self.worker, clock)
        self._server = server
        self._defaults = defaults or Policy()
        self._listen_url = listen_url or db.url
        self._decoding: Decoding = decode
        self._max_bytes: int | None = None
        self._layouts: dict[str, Layout] = {}
        self._hints = AsyncHints(db.url) if bridged() else Hints(db.url)
        self._listening = AsyncListening(self._listen_url) if bridged() else Listening(self._listen_url)
        if share_commits:
            self._share_commits()

    def _share_commits(self) -> None:
        """From now on threads of this client share transactions."""
        if self._shared is None:
            self._shared = SharedCommits(self._db, self)

    def close(self) -> None:
        """Closes the connections; the last user of an embedded database stops its server."""
        self._listening.close()
        self._hints.close()
        self._db.close()
        if self._server is not None:
            outside(self._server.close)

    @property
    def database_url(self) -> str:
        """The libpq URL in use."""
        return self._db.url

    def ping(self) -> None:
        """Raises if the database does not answer."""
        self._db.ping()

    def _layout_of(self, topic: str) -> Layout:
        layout = self._layouts.get(topic)
        if layout is None:
            _, partitions, priorities = self._db.call("layout", topic=topic)[0]
            layout = self._layouts[topic] = Layout(partitions, priorities)
        return layout

    def _forget(self, topic: str) -> None:
        self._layouts.pop(topic, None)

    def _rows(self, function: str, /, *, on: Connection | None = None, **arguments: Any) -> list[dict[str, Any]]:
        """Calls an SQL function in one round trip; returns its rows."""
        return self._db.call_dicts(function, on=on, **arguments)

    def _value(self, function: str, /, *, on: Connection | None = None, **arguments: Any) -> Any:
        """Calls an SQL function that returns one value."""
        return self._db.call(function, on=on, **arguments)[0][0]
