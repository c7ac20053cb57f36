"""A worker whose handlers run on an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from custody.bridge import outside, run
from custody.engine import Custody
from custody.worker import Worker, WorkerSummary
from custody.worker.handler_runner import Handler


async def work_in_thread(
    opened: Callable[[], Custody], topic: str, group: str, handler: Handler, **settings: Any
) -> WorkerSummary:
    """Runs a worker until the task is cancelled. Then the worker stops gracefully, and this ends after it."""
    loop = asyncio.get_running_loop()
    blocking = await run(lambda: outside(opened), undo=lambda late: outside(late.close))
    try:
        make = partial(blocking.worker_for, topic, group, handler, loop=loop, **settings)
        worker = await run(lambda: outside(make))
        ended = _start(worker, loop)
        try:
            return await asyncio.shield(ended)
        except asyncio.CancelledError as cancellation:
            worker.stop()
            await asyncio.wait([ended])
            raise cancellation from ended.exception()
    finally:
        await run(lambda: outside(blocking.close))


def _start(worker: Worker, loop: asyncio.AbstractEventLoop) -> asyncio.Future[WorkerSummary]:
    """Runs the worker in a thread of its own. It must not take one of the loop's few threads."""
    ended: asyncio.Future[WorkerSummary] = loop.create_future()

    def work() -> None:
        try:
            summary = worker.run()
        except BaseException as error:
            loop.call_soon_threadsafe(ended.set_exception, error)
        else:
            loop.call_soon_threadsafe(ended.set_result, summary)

    threading.Thread(target=work, name="custody-worker", daemon=True).start()
    return ended
