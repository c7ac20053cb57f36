"""Pictures stay small and readable, however many messages there are."""

from __future__ import annotations

import pytest

from custody.dashboard.picture import HEIGHT, LEAST, sparkline, strip
from custody.model.insights import Bin, OffsetMap

pytestmark = pytest.mark.req("N6")


def test_one_dead_message_among_ten_million_is_seen() -> None:
    of = OffsetMap(
        partition=3,
        first_offset=0,
        until_offset=10_000_000,
        frontier=9_000_000,
        width=50_000,
        bins=(Bin(first_offset=4_000_000, in_flight=0, waiting=0, parked=25_000, dead=1),),
    )
    found = strip(of)
    assert (found.width, found.done) == (200, 180)
    (cell,) = found.cells
    assert (cell.x, cell.first_offset, cell.until_offset, cell.single) == (80, 4_000_000, 4_050_000, False)
    assert [(bar.kind, bar.y, bar.height) for bar in cell.bars] == [("dead", 0, LEAST), ("parked", LEAST, HEIGHT / 2)]
    assert cell.words == "offsets 4,000,000 to 4,049,999: 1 dead, 25,000 behind a key"
    assert "1 dead" in found.words
    assert "1,000,000 not delivered yet" in found.words


def test_a_partition_without_messages_is_a_picture_too() -> None:
    of = OffsetMap(partition=0, first_offset=7, until_offset=7, frontier=7, width=1, bins=())
    found = strip(of)
    assert (found.width, found.done, found.cells) == (1, 0, ())


def test_bars_stay_within_the_picture() -> None:
    bins = (Bin(first_offset=0, in_flight=1, waiting=1, parked=96, dead=2),)
    (cell,) = strip(OffsetMap(partition=0, first_offset=0, until_offset=100, frontier=100, width=100, bins=bins)).cells
    assert all(bar.y + bar.height <= HEIGHT for bar in cell.bars)


def test_a_line_needs_two_values_and_says_what_it_shows() -> None:
    assert sparkline([(0.0, 5)]) is None
    found = sparkline([(120.0, 0), (60.0, 10), (0.0, 5)])
    assert found is not None
    assert found.points == "0.0,19.0 50.0,1.0 100.0,10.0"
    assert found.words == "lag of the last 2 min: from 0 to 5, at most 10"
    flat = sparkline([(120.0, 0), (0.0, 0)])
    assert flat is not None
    assert flat.points == "0.0,19.0 100.0,19.0"
