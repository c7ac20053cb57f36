"""The outbox for asyncio: events in the transaction of an asynchronous connection or session."""

from custody.aio.derived.outbox import lock, write

__all__ = ["write", "lock"]
