"""For your own tests: a fresh database in milliseconds, a clock to move, and `drain`, which works until nothing is due.

In pytest write `pytest_plugins = ["custody.testing.fixtures"]` in conftest.py and ask for the fixture `custody`.
Anywhere else use `server()`, as the fixtures do.
"""

from custody.testing.clock import Clock
from custody.testing.drain import Drained, drain
from custody.testing.server import TestCustody, TestServer, server

__all__ = ["Clock", "Drained", "TestCustody", "TestServer", "drain", "server"]
