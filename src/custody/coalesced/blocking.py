"""The answer to a caller whose request would make the others wait for a lock."""

from __future__ import annotations

from custody.errors import Busy

BLOCKED = Busy("a lock is held by another transaction, and nothing was done")
"""Nothing was done for this caller. Its request has to be tried again alone, so that it does not delay others."""
