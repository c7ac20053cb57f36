"""How pipelines are run: what is refused before anything is started for them."""

from __future__ import annotations

from typing import Any

import pytest

from custody.errors import InvalidArgument
from custody.spark.settings import RunSettings


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"max_per_batch": 0}, "max_per_batch cannot be 0. It is a whole number from 1 to"),
        ({"max_per_batch": 2**31}, "max_per_batch cannot be 2147483648"),
        ({"max_per_batch": None}, "max_per_batch cannot be None"),
        ({"max_per_batch": True}, "max_per_batch cannot be True"),
        ({"batch_time": float("nan")}, "nan is not a duration"),
        ({"batch_time": 0}, "must be more than 0"),
        ({"batch_time": "soon"}, "soon"),
        ({"drain": "soon"}, "soon"),
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        RunSettings(**settings)


def test_a_pass_is_what_ends_by_itself() -> None:
    assert not RunSettings().one_pass
    assert RunSettings(available_now=True).one_pass
    assert RunSettings(drain="1m").one_pass
    assert RunSettings(drain="1m").drain_seconds == 60
