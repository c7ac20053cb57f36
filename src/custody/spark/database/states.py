"""What the tasks of a keyed pipeline ask of the database: the states of their keys, and a stage for new ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from custody.errors import ClaimLost
from custody.spark.database.tasks import TaskClaim
from custody.store import staging
from custody.store.state_staging import copy_states, state_row
from custody.verbs.pipelines import StagedStates

FULL = 8 << 20
"""Bytes of states that an attempt collects before it writes them."""


class Found(NamedTuple):
    """The stored state of a key, as JSON. `own`: whether the partition is the one of the key."""

    own: bool
    state: bytes | None


class ClaimStates:
    """The states of one attempt of a task: read as of its claim, and staged under a number that only it has."""

    def __init__(self, claim: TaskClaim, attempt: int, ttl: float | None) -> None:
        self._claim, self._attempt, self._ttl = claim, attempt, ttl
        self._rows: list[bytes] = []
        self._bytes = self._written = 0
        self._changes: int | None = None
        self._stage: str | None = None

    def read(self, partition: int, keys: Sequence[str]) -> dict[str, Found]:
        """The states of these keys of messages of a partition, in one query."""
        claim = self._claim
        rows = staging.call(
            claim.url,
            "states_of_claim",
            group_id=claim.group_id,
            claim=claim.number,
            partition=partition,
            keys=list(keys),
        )
        if len(rows) < len(keys):
            raise ClaimLost(f"claim {claim.number} is no longer in flight", "Another driver may have taken over.")
        # the smallest: what was read before an operator removed states is refused by the commit
        seen = min(changes for *_, changes in rows)
        self._changes = seen if self._changes is None else min(seen, self._changes)
        return {key: Found(own, None if state is None else state.encode()) for key, own, state, _ in rows}

    def add(self, partition: int, offset: int, key: str, state: bytes | None) -> None:
        """Stages the state of a key after this message; None: it was cleared."""
        row = state_row(self._attempt, partition, offset, key.encode(), state)
        self._rows.append(row)
        self._bytes += len(row)
        if self._bytes >= FULL:
            self._flush()

    def write(self) -> StagedStates | None:
        """Writes what is left, and returns the number of all; None if no state was read."""
        self._flush()
        if self._changes is None:
            return None
        return StagedStates(self._attempt, self._written, self._changes, self._ttl)

    def _flush(self) -> None:
        if not self._rows:
            return
        if self._stage is None:
            claim = self._claim
            self._stage = staging.call(claim.url, "open_state_stage", group_id=claim.group_id, claim=claim.number)[0][0]
        copy_states(self._claim.url, self._stage, self._rows)
        self._written += len(self._rows)
        self._rows, self._bytes = [], 0
