"""The order rule, checked on the journal alone: nothing goes while an earlier message of its key is unresolved."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import psycopg
from tests.property.journal import Entry, Journal

from custody.model.lifecycle import JOURNAL, MessageState

_ENTRIES = """
SELECT j.entry, j.kind, j.offsets, j.lease_id
FROM custody.journal j JOIN custody.groups g USING (group_id) JOIN custody.topics t USING (topic_id)
WHERE t.name = %s AND g.name = %s AND j.partition = %s AND j.offsets IS NOT NULL ORDER BY j.entry
"""
_KEYS = 'SELECT "offset", key FROM custody.events WHERE topic = %s AND partition = %s'


@dataclass
class Audit:
    """What the journal of one (group, partition) says."""

    violations: list[str] = field(default_factory=list)
    claims: int = 0
    deliveries: int = 0
    states: dict[int, MessageState] = field(default_factory=dict)

    def count(self, state: MessageState) -> int:
        return sum(1 for each in self.states.values() if each is state)


def audit(
    db: psycopg.Connection[Any],
    topic: str,
    group: str,
    partition: int = 0,
    *,
    hold: bool = False,
    keys: Mapping[int, str | None] | None = None,
) -> Audit:
    """Folds the journal, which refuses illegal moves, and collects every hand-out that broke the order of a key.

    A message may be handed out only if no other lease holds one of its key, and every earlier one of its key is done,
    dead (and not held), or handed out with it. `keys` says which key each offset had, where the
    log may not know it any more.
    """
    if keys is None:
        keys = dict(db.execute(_KEYS, (topic, partition)).fetchall())
    of_key: dict[str, list[int]] = defaultdict(list)
    for offset, key in sorted(keys.items()):
        if key is not None:
            of_key[key].append(offset)
    unresolved: dict[str, set[int]] = {key: set(offsets) for key, offsets in of_key.items()}
    holder: dict[int, UUID] = {}
    journal = Journal()
    result = Audit()
    for number, kind, ranges, lease_id in db.execute(_ENTRIES, (topic, group, partition)).fetchall():
        entry = Entry(number, kind, tuple((r.lower, r.upper) for r in ranges))
        journal.extend([entry])
        offsets = list(entry.offsets())
        if kind == "claim":
            result.claims += 1
            result.deliveries += len(offsets)
            together = set(offsets)
            last = {key: offset for offset in sorted(offsets) if (key := keys.get(offset)) is not None}
            for key, offset in last.items():
                for earlier in sorted(unresolved[key] - together):
                    if earlier < offset or earlier in holder:
                        result.violations.append(
                            f"entry {number}: {key}@{offset} while {key}@{earlier} is {journal.messages[earlier].state}"
                        )
        state = JOURNAL[kind].target
        for offset in offsets:
            key = keys.get(offset)
            if kind == "claim":
                holder[offset] = lease_id
            elif state is not None:
                holder.pop(offset, None)
            if key is None:
                continue
            if state is MessageState.DONE or (state is MessageState.DEAD and not hold) or kind == "free":
                unresolved[key].discard(offset)
            elif state is not None:
                unresolved[key].add(offset)
    result.states = {offset: message.state for offset, message in journal.messages.items()}
    return result
