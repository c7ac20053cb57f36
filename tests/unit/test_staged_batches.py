"""How the outputs of a task are cut into rows of the log."""

from __future__ import annotations

import pytest

from custody.model.codec import Encoded
from custody.store.staged_batches import batches


def small(count: int, size: int = 10) -> list[Encoded]:
    return [("k", b"j", b"1" * size, None)] * count


def test_one_stretch_is_cut_into_equal_batches() -> None:
    made = batches(small(2500), [(0, n) for n in range(2500)])
    assert made is not None
    assert [(batch.n, len(batch.messages), batch.sources[0]) for batch in made] == [
        (0, 834, (0, 0)), (834, 834, (0, 834)), (1668, 832, (0, 1668)),
    ]  # fmt: skip


def test_a_batch_has_sources_of_one_partition_that_do_not_decrease() -> None:
    sources = [*((0, n // 3) for n in range(60)), *((1, n) for n in range(40)), *((1, n) for n in range(20))]
    made = batches(small(120), sources)
    assert made is not None
    assert [(batch.n, len(batch.messages)) for batch in made] == [(0, 60), (60, 40), (100, 20)]


def test_a_batch_has_at_most_so_many_bytes() -> None:
    made = batches(small(1000, 900), [(0, n) for n in range(1000)])
    assert made is not None
    assert [len(batch.messages) for batch in made] == [250] * 4


@pytest.mark.parametrize(
    ("messages", "sources"),
    [
        (small(15), [(0, n) for n in range(15)]),
        (small(100, 1000), [(0, n) for n in range(100)]),
        (small(100), [(0, -n) for n in range(100)]),
        (small(100), [(0, n << 40) for n in range(100)]),
    ],
    ids=["few", "large", "backwards", "far apart"],
)
def test_what_is_no_batch_is_staged_message_by_message(messages: list[Encoded], sources: list[tuple[int, int]]) -> None:
    assert batches(messages, sources) is None
