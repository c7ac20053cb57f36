"""For your own tests: a fresh database in milliseconds, a movable clock, and `drain`, which handles all messages.

In pytest use the fixtures `custody_db`, `custody_clock`, `drain` and `freeze` of `pytest_custody`. Elsewhere use
`server()`, as the fixtures do.
"""

from custody.testing.clock import Clock
from custody.testing.drain import Drained, drain
from custody.testing.literals import unpacked
from custody.testing.replay import Attempt, Replay, replay
from custody.testing.server import TestCustody, TestServer, server

__all__ = [
    "Attempt",
    "Clock",
    "Drained",
    "Replay",
    "TestCustody",
    "TestServer",
    "drain",
    "replay",
    "server",
    "unpacked",
]
