"""Custody for asyncio: the same verbs as coroutines, on connections that do not block the event loop."""

from custody.aio import outbox as outbox
from custody.aio.connection import connect
from custody.aio.custody import Custody
from custody.aio.derived.lease import Lease
from custody.aio.derived.once import forget_once, once
from custody.aio.derived.producer import IdempotentProducer
from custody.aio.derived.transaction import Transaction

__all__ = ["connect", "Custody", "Lease", "IdempotentProducer", "Transaction", "outbox", "once", "forget_once"]
