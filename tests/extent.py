"""How much random tests do: little in `make test`, more in the core part of `.ci/run`, which sets the variable."""

from __future__ import annotations

import os

EXAMPLES = int(os.environ.get("CUSTODY_PROPERTY_EXAMPLES", "2"))
