"""The façade for asyncio: every verb of Custody in one class, as coroutines."""

from __future__ import annotations

from custody.aio.derived.apikeys import ApiKeys
from custody.aio.derived.consuming import Consuming
from custody.aio.derived.dead_letters import DeadLetters
from custody.aio.derived.ensuring import Ensuring
from custody.aio.derived.operating import Operating
from custody.aio.derived.producers import Producers


class Custody(Producers, Consuming, Ensuring, DeadLetters, Operating, ApiKeys):
    """An open Custody for one event loop. Safe for use by many tasks; close it, or use it as a context manager."""
