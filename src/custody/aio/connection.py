"""connect() for asyncio."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path

from custody import connection
from custody.aio.custody import Custody
from custody.aio.live import Opening
from custody.bridge import run
from custody.model.policy import Duration


def connect(
    database: str | None = None,
    *,
    home: str | Path | None = None,
    worker: str | None = None,
    pool_size: int = 10,
    statement_timeout: Duration | None = None,
    listen_url: str | None = None,
    clock: Callable[[], datetime] | None = None,
    api_key: str | None = None,
    ca: str | Path | None = None,
    retry_for: Duration | None = None,
    allow_insecure: bool = False,
) -> Opening[Custody]:
    """Opens Custody for the running event loop: `async with custody.aio.connect() as c`, or `c = await
    custody.aio.connect()` and later `await c.close()`.

    The arguments are those of `custody.connect`. It belongs to the event loop that has opened it: tasks of that loop
    share it, and threads do not.
    """

    open_blocking = partial(
        connection.connect,
        database,
        home=home,
        worker=worker,
        pool_size=pool_size,
        statement_timeout=statement_timeout,
        listen_url=listen_url,
        clock=clock,
        api_key=api_key,
        ca=ca,
        retry_for=retry_for,
        allow_insecure=allow_insecure,
    )

    async def opened() -> Custody:
        return Custody(await run(open_blocking, undo=lambda late: late.close()), open_blocking)

    return Opening(opened)
