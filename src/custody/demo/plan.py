"""The messages of the demos, and the expected result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import custody


@dataclass(frozen=True, kw_only=True)
class Plan:
    """`skus` with `changes` each: ADD 100, then REMOVE 1 many times, with the SKUs mixed.

    Some changes of every seventh SKU time out twice. The first `poison` SKUs get a change that is not a number; the
    X
    """

    skus: int = 400
    changes: int = 30
    poison: int = 5
    kills: bool = True

    def messages(self) -> list[custody.Outgoing]:
        return [
            custody.Outgoing(self._change(sku, number), key=f"SKU-{sku}")
            for number in range(self.changes)
            for sku in range(self.skus)
        ]

    def _change(self, sku: int, number: int) -> dict[str, Any]:
        change: dict[str, Any] = {"sku": f"SKU-{sku}", "number": number, "by": 100 if number == 0 else -1}
        if sku % 7 == 0 and number % 20 == 0:
            change["fails"] = 2
        if number == self.changes // 2:
            if sku < self.poison:
                change["by"] = "-1 unit"
            elif sku == self.poison and self.kills:
                change["kills"] = True
            elif sku == self.poison + 1:
                change["units"] = "1O0"  # the letter, not the digit
        return change

    @property
    def published(self) -> int:
        return self.skus * self.changes

    @property
    def dead(self) -> int:
        """The poison messages, and the one that ends its process."""
        return self.poison + self.kills

    @property
    def behind_dead(self) -> int:
        return self.dead * (self.changes - self.changes // 2 - 1)

    @property
    def done(self) -> int:
        return self.published - self.dead - self.behind_dead

    def quantity(self, sku: int, *, repaired: bool = False) -> int:
        """The stock of a SKU at the end; `repaired`: its dead message was redriven and has succeeded."""
        applied = self.changes // 2 if sku < self.dead and not repaired else self.changes
        return 100 - (applied - 1)
