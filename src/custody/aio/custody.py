"""The façade for asyncio: every verb of Custody in one class, as coroutines."""

from __future__ import annotations

from collections.abc import Callable

from custody import engine
from custody.aio.derived.apikeys import ApiKeys
from custody.aio.derived.consuming import Consuming
from custody.aio.derived.dead_letters import DeadLetters
from custody.aio.derived.ensuring import Ensuring
from custody.aio.derived.key_states import KeyStates
from custody.aio.derived.producers import Producers
from custody.aio.derived.surveying import Surveying
from custody.aio.working import work_in_thread
from custody.model.policy import Duration
from custody.worker import WorkerSummary
from custody.worker.handler_runner import Handler


class Custody(Producers, Consuming, Ensuring, DeadLetters, KeyStates, Surveying, ApiKeys):
    """An open Custody for one event loop. Safe for use by many tasks; close it, or use it as a context manager."""

    def __init__(self, of: engine.Custody, open_blocking: Callable[[], engine.Custody]) -> None:
        super().__init__(of)
        self._open_blocking = open_blocking

    async def work(
        self,
        topic: str,
        group: str,
        handler: Handler,
        *,
        payload: type | None = None,
        concurrency: int = 8,
        max_messages: int | None = None,
        visibility_timeout: Duration | None = None,
        poll: Duration = "1s",
        grace: Duration = "30s",
    ) -> WorkerSummary:
        """Claims messages, awaits the handler for each on this event loop, and settles, until the task is cancelled.

        Then running handlers have `grace` to finish, and the rest is released. The arguments are those of
        `custody.Custody.work`. It is the same worker, in threads with connections of their own: leases are extended
        also while a handler keeps the event loop busy. A plain function is called in one of these threads.
        """
        return await work_in_thread(
            self._open_blocking,
            topic,
            group,
            handler,
            payload=payload,
            concurrency=concurrency,
            max_messages=max_messages,
            visibility_timeout=visibility_timeout,
            poll=poll,
            grace=grace,
        )
