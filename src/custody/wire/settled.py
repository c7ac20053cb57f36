"""What a settle did."""

from __future__ import annotations

from typing import Self

from msgspec import UNSET, Struct, UnsetType

from custody.model.entities import Settled


class SettledOut(Struct):
    """How many messages were settled, which offsets are dead now, and which later ones of a key left the lease.

    `already` is true if the same lease had already settled some of them in this way; otherwise it is left out.
    """

    settled: int
    dead: tuple[int, ...] = ()
    released: tuple[int, ...] = ()
    already: bool | UnsetType = UNSET

    @classmethod
    def of(cls, *each: Settled) -> Self:
        return cls(
            sum(one.settled for one in each),
            tuple(offset for one in each for offset in one.dead),
            tuple(offset for one in each for offset in one.released),
            any(one.already for one in each) or UNSET,
        )

    def value(self) -> Settled:
        return Settled(settled=self.settled, dead=self.dead, released=self.released, already=self.already is True)
