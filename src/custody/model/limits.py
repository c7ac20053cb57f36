"""The largest numbers and the longest names that Custody stores."""

from __future__ import annotations

SMALL = 2**31 - 1
"""The largest number of an `int` column."""
LARGE = 2**63 - 2**33
"""The largest number of a `bigint` column, less a batch: adding to an offset does not overflow."""
MOST = 10_000
"""The most messages of one request or answer, unless a server has another limit."""
LARGEST = 2**62
"""The largest offset, size or cap that a request or a setting can have."""
NAME_LENGTH = 200
"""The most characters of a name that is stored as it is, in an index."""
