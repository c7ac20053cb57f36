"""Splits the messages of a claim among tasks. No key is in two tasks, so keeping order needs no shuffle."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

from custody.verbs.pipelines import Part, Ranges

SMALLEST = 500
"""Fewer messages than this do not get a task of their own."""


class Piece(NamedTuple):
    """A part of a partition: the k-th of m shares by key of these offsets; 0 of 1 for all."""

    partition: int
    ranges: Ranges
    share: int
    of: int
    messages: int


def shares(parts: Sequence[Part], tasks: int, *, ordered: bool) -> list[list[Piece]]:
    """The pieces for each task: at most `tasks` tasks of about equal size."""
    total = sum(part.messages for part in parts)
    aim = max(SMALLEST, -(-total // max(1, tasks)))
    pieces = [piece for part in parts for piece in _pieces(part, max(1, round(part.messages / aim)), ordered=ordered)]
    # largest first, each to the task with the fewest messages
    bins: list[tuple[int, int, list[Piece]]] = [(0, number, []) for number in range(min(tasks, len(pieces)))]
    for piece in sorted(pieces, key=lambda piece: piece.messages, reverse=True):
        size, number, taken = heapq.heappop(bins)
        heapq.heappush(bins, (size + piece.messages, number, [*taken, piece]))
    return [sorted(taken) for _, _, taken in sorted(bins, key=lambda filled: filled[1])]


def _pieces(part: Part, count: int, *, ordered: bool) -> list[Piece]:
    if count == 1:
        return [Piece(part.partition, part.ranges, 0, 1, part.messages)]
    if ordered:
        each = part.messages // count
        return [Piece(part.partition, part.ranges, share, count, each) for share in range(count)]
    return [
        Piece(part.partition, stretch, 0, 1, sum(last - first for first, last in stretch))
        for stretch in _stretches(part.ranges, -(-part.messages // count))
    ]


def _stretches(ranges: Ranges, size: int) -> list[Ranges]:
    """The ranges, cut into runs of `size` messages."""
    found: list[list[tuple[int, int]]] = []
    room = 0
    for first, last in ranges:
        while first < last:
            if room == 0:
                found.append([])
                room = size
            taken = min(room, last - first)
            found[-1].append((first, first + taken))
            first, room = first + taken, room - taken
    return [tuple(stretch) for stretch in found]
