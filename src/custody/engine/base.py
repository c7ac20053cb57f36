"""What every part of the façade leans on: the database, the clock, hints to those who wait."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any

from custody.config import this_process
from custody.model.bounds import Bounded
from custody.model.codec import Decoding, decode
from custody.model.placement import Layout
from custody.model.policy import Policy
from custody.store.embedded import EmbeddedServer
from custody.store.migrate import parameters_of
from custody.store.notify import Hints
from custody.store.postgres import Connection, Database


class Base(Bounded):
    """An open database, with the clock and the name under which things are done."""

    def __init__(
        self,
        db: Database,
        *,
        server: EmbeddedServer | None = None,
        defaults: Policy | None = None,
        worker: str | None = None,
        clock: Callable[[], datetime] | None = None,
        listen_url: str | None = None,
    ) -> None:
        self._db = db
        self._server = server
        self._defaults = defaults or Policy()
        self._clock = clock
        self._listen_url = listen_url or db.url
        self._decoding: Decoding = decode
        self._max_bytes: int | None = None
        self._layouts: dict[str, Layout] = {}
        self._hints = Hints(db.url)
        self.worker = worker or this_process()

    def close(self) -> None:
        """Gives the connections back; the last user of an embedded database stops it."""
        self._hints.close()
        self._db.close()
        if self._server is not None:
            self._server.close()

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

    def _rows(self, function: str, /, *, on: Connection | None = None, **arguments: Any) -> list[dict[str, Any]]:
        """One SQL function, one round trip: its rows. The time and who acts are added for those that take them."""
        return self._db.call_dicts(function, on=on, **self._injected(function), **arguments)

    def _value(self, function: str, /, *, on: Connection | None = None, **arguments: Any) -> Any:
        """The same of a function that returns one value."""
        return self._db.call(function, on=on, **self._injected(function), **arguments)[0][0]

    def _injected(self, function: str) -> dict[str, Any]:
        known = {"now": self._now(), "actor": self.worker, "worker": self.worker}
        return {name: known[name] for name in parameters_of(function) if name in known}

    def _now(self) -> datetime | None:
        return None if self._clock is None else self._clock()
