"""The asynchronous façade with the methods of the blocking one: each call is run to its end on the loop of a thread.

So tests of the blocking façade run on the other one too.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import custody.aio
from custody.aio.derived.transactions import Transactions

LIVE = (custody.aio.Lease, custody.aio.IdempotentProducer, custody.aio.Transaction, Transactions)


class Loop:
    """An event loop in a thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="test-loop", daemon=True)
        self._thread.start()

    def __call__(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def close(self) -> None:
        self(self._loop.shutdown_asyncgens())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


class OnALoop:
    """One object of the asynchronous façade."""

    def __init__(self, of: Any, loop: Loop) -> None:
        self._of, self._loop = of, loop

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._of, name)
        if inspect.iscoroutinefunction(found):
            return lambda *args, **rest: self._done(
                found(*map(_given, args), **{n: _given(v) for n, v in rest.items()})
            )
        if callable(found) and name == "transaction":
            return lambda **rest: self._done(_awaited(found(**rest)))
        return self._met(found)

    def _done(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._met(self._loop(work))

    def _met(self, found: Any) -> Any:
        return OnALoop(found, self._loop) if isinstance(found, LIVE) else found

    def __bool__(self) -> bool:
        return bool(self._of)

    def __len__(self) -> int:
        return len(self._of)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._of)

    def __repr__(self) -> str:
        return repr(self._of)

    def __enter__(self) -> OnALoop:
        return self

    def __exit__(self, *raised: Any) -> None:
        self._loop(self._of.__aexit__(*raised))


def _given(value: Any) -> Any:
    return value._of if isinstance(value, OnALoop) else value


async def _awaited(opening: Any) -> Any:
    return await opening


@contextmanager
def on_a_loop(url: str, **settings: Any) -> Iterator[Any]:
    """Custody for asyncio on its own loop, to be used like `custody.connect`."""
    loop = Loop()
    try:

        async def opened() -> custody.aio.Custody:
            return await custody.aio.connect(url, **settings)

        with OnALoop(loop(opened()), loop) as c:
            yield c
    finally:
        loop.close()
