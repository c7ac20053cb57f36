"""The load of HTTP requests that the benchmark sends."""

from __future__ import annotations

import pytest
from bench.load import received


def test_a_load_that_would_wait_for_messages_is_no_measurement() -> None:
    assert received({"messages": [1]}) == [1]
    with pytest.raises(RuntimeError, match="not long enough"):
        received({"messages": [], "reason": "empty"})
