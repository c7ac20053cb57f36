"""How much tests do: little in `make test`, all in the core part of `.ci/run`, which sets the variable."""

from __future__ import annotations

import os

EXAMPLES = int(os.environ.get("CUSTODY_PROPERTY_EXAMPLES", "1"))
"""Of random tests."""


def size(quick: int, full: int) -> int:
    """The size of a test marked `core`."""
    return quick if EXAMPLES == 1 else full
