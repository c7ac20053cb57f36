"""What is said of a caller who would hold up the others."""

from __future__ import annotations

from custody.errors import Busy

BLOCKED = Busy("somebody holds what this needs, and nothing was done")
"""The answer to a caller who has to be tried again without others, whom it would hold up."""
