"""The state of every message, read from the tables of one (group, partition), at a time that the test chooses."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import psycopg
from tests.property.journal import Entry
from tests.property.model import Death

from custody.model.lifecycle import MessageState

Connection = psycopg.Connection[Any]

_GROUP = """
SELECT g.group_id, h.topic_id, g.ordering = 'key'
FROM custody.groups g JOIN custody.topics t USING (topic_id) JOIN custody.heads h USING (topic_id)
WHERE t.name = %s AND g.name = %s AND h.partition = %s
"""
_FRONTIER = "SELECT frontier FROM custody.position(%(group)s, %(partition)s)"
_KEYS = """
SELECT e."offset", e.key
FROM custody.heads h, custody.tail(h) t, custody.keys_of(h, int8multirange(int8range(0, t.next_offset))) e
WHERE h.topic_id = %(topic)s AND h.partition = %(partition)s
"""
_LEASES = """
SELECT lease_id, held, remaining, of_cases, attempt, deadline FROM custody.leases
WHERE group_id = %(group)s AND partition = %(partition)s
"""
_RETURNED = "SELECT ranges, attempts FROM custody.returned WHERE group_id = %(group)s AND partition = %(partition)s"
_REWOUND = """
SELECT ranges FROM custody.returned WHERE group_id = %(group)s AND partition = %(partition)s AND rewound
"""
_CASES = """
SELECT "offset", key, state, held, attempts, failures FROM custody.cases
WHERE group_id = %(group)s AND partition = %(partition)s
"""
_PARKED = "SELECT key, ranges, messages FROM custody.parked WHERE group_id = %(group)s AND partition = %(partition)s"
_HINTS = """
SELECT key FROM custody.freed WHERE group_id = %(group)s AND partition = %(partition)s
UNION SELECT key FROM custody.awaited WHERE group_id = %(group)s AND partition = %(partition)s
"""
_JOURNAL = """
SELECT entry, kind, offsets FROM custody.journal
WHERE group_id = %(group)s AND (partition = %(partition)s OR partition IS NULL) AND entry > %(after)s ORDER BY entry
"""
_DELIVERIES = """
SELECT event_offset, status, attempts FROM custody.deliveries
WHERE topic = %(topic_name)s AND consumer_group = %(group_name)s AND partition = %(partition)s ORDER BY event_offset
"""
_COPIES = """
SELECT e."offset", e.key, e.headers
FROM custody.topics t JOIN custody.heads h USING (topic_id), custody.tail(h) l,
     custody.events_in(h, int8multirange(int8range(%(after)s, l.next_offset))) e
WHERE t.name = %(topic_name)s || '-dlq' AND l.next_offset > %(after)s
"""


@dataclass
class Place:
    """Where one message stands."""

    key: str | None
    where: str
    state: MessageState
    """As every reader sees it: a lease past its deadline is expired, folded or not."""
    recorded: MessageState
    """As it was last written: what was leased is processing until a claim folds the expired lease."""
    attempts: int = 0
    failures: int = 0
    held: bool = False


@dataclass
class Tables:
    frontier: int
    messages: dict[int, Place]
    hints: set[str]
    live_keys: dict[str, set[Any]] = field(default_factory=lambda: defaultdict(set))

    def lost_wake_ups(self) -> list[str]:
        """Keys with parked messages that nothing would ever look at again.

        A parked message is found again by a hint, or by the closing of an open case before it, which leaves one.
        """
        parked: dict[str, int] = {}
        cases: dict[str, int] = {}
        for offset, place in sorted(self.messages.items()):
            if place.key is None:
                continue
            if "parked" in place.where:
                parked.setdefault(place.key, offset)
            elif place.where in ("case waiting", "case leased") or place.held:
                cases.setdefault(place.key, offset)
        return [key for key, first in parked.items() if key not in self.hints and cases.get(key, first) >= first]


class Reader:
    """Reads one (group, partition). Each reading checks that no message stands in two places."""

    def __init__(self, connection: Connection, topic: str, group: str, partition: int = 0) -> None:
        self._connection = connection
        row = connection.execute(_GROUP, (topic, group, partition)).fetchone()
        assert row is not None, f"there is no {topic}/{partition} with a group {group}"
        self.ordered: bool = row[2]
        self._which = {
            "group": row[0],
            "topic": row[1],
            "partition": partition,
            "topic_name": topic,
            "group_name": group,
        }

    def _rows(self, query: str, **more: Any) -> list[tuple[Any, ...]]:
        return self._connection.execute(query, {**self._which, **more}).fetchall()

    def journal(self, after: int = 0) -> list[Entry]:
        """The entries after that number, in order."""
        return [
            Entry(number, kind, tuple((r.lower, r.upper) for r in offsets or ()))
            for number, kind, offsets in self._rows(_JOURNAL, after=after)
        ]

    def frontier(self) -> int:
        return int(self._rows(_FRONTIER)[0][0])

    def rewound(self) -> set[int]:
        """What a rewind has brought back and no claim has looked at since."""
        return {offset for (ranges,) in self._rows(_REWOUND) for offset in _offsets(ranges)}

    def deliveries(self) -> list[tuple[int, MessageState, int]]:
        """What the view says: offset, status and attempts of each row."""
        return [(offset, MessageState(status), attempts) for offset, status, attempts in self._rows(_DELIVERIES)]

    def copies(self, after: int) -> list[Death]:
        """What the copies in the dead-letter topic say, from that one on."""
        found = self._rows(_COPIES, after=after)
        assert [row[0] for row in found] == list(range(after, after + len(found))), "the copies are not dense"
        return [
            Death(
                int(headers["x-custody-original-offset"]),
                key,
                headers["x-custody-dlq-reason"],
                int(headers["x-custody-delivery-attempts"]),
            )
            for _, key, headers in found
        ]

    def read(self, now: datetime) -> Tables:
        with self._connection.transaction():
            self._connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
            return self._read(now)

    def _read(self, now: datetime) -> Tables:
        frontier = self.frontier()
        keys: dict[int, str | None] = dict(self._rows(_KEYS))
        tables = Tables(frontier=frontier, messages={}, hints={key for (key,) in self._rows(_HINTS)})
        cases = {row[0]: row[1:] for row in self._rows(_CASES)}

        def put(offset: int, where: str, state: MessageState, **more: Any) -> None:
            assert offset in keys, f"{where}: offset {offset} is not in the log"
            assert offset < frontier, f"{where}: offset {offset} is beyond the frontier {frontier}"
            assert offset not in tables.messages, f"offset {offset}: {where} and {tables.messages[offset].where}"
            more.setdefault("recorded", state)
            tables.messages[offset] = Place(keys[offset], where, state, **more)

        leased = set()
        for lease_id, held, remaining, of_cases, attempt, deadline in self._rows(_LEASES):
            offsets = _offsets(held)
            assert len(offsets) == remaining, f"lease {lease_id} holds {held}, and says {remaining}"
            state = MessageState.PROCESSING if deadline > now else MessageState.READY
            for offset in offsets:
                attempts, failures = attempt, 0
                if of_cases:
                    assert offset in cases, f"lease {lease_id}: offset {offset} has no case"
                    _, case_state, _, attempts, failures = cases[offset]
                    assert case_state == "leased", f"lease {lease_id}: the case of offset {offset} is {case_state}"
                    leased.add(offset)
                put(offset, "lease", state, recorded=MessageState.PROCESSING, attempts=attempts, failures=failures)
                if of_cases:
                    tables.messages[offset].where = "case leased"
                key = keys[offset]
                if state is MessageState.PROCESSING and key is not None:
                    tables.live_keys[key].add(lease_id)
        for offset, (key, state_name, held, attempts, failures) in cases.items():
            assert key == keys.get(offset), f"the case of offset {offset} has key {key!r}, the log {keys.get(offset)!r}"
            if state_name == "leased":
                assert offset in leased, f"the case of offset {offset} is leased, but no lease holds it"
                continue
            state = MessageState.DEAD if state_name == "dead" else MessageState.READY
            put(offset, f"case {state_name}", state, attempts=attempts, failures=failures, held=held)
        for ranges, attempts in self._rows(_RETURNED):
            for offset in _offsets(ranges):
                put(offset, "returned", MessageState.READY, attempts=attempts)
        for key, ranges, messages in self._rows(_PARKED):
            assert len(_offsets(ranges)) == messages, f"parked {ranges} of {key!r}, and says {messages}"
            for offset in _offsets(ranges):
                put(offset, "parked", MessageState.READY)
                assert key == keys[offset], f"offset {offset} is parked under {key!r}, the log says {keys[offset]!r}"
        for offset, key in keys.items():
            if offset not in tables.messages:
                state = MessageState.DONE if offset < frontier else MessageState.READY
                tables.messages[offset] = Place(key, "resolved" if offset < frontier else "fresh", state, state)
        return tables


def _offsets(ranges: Any) -> list[int]:
    return [offset for r in ranges for offset in range(r.lower, r.upper)]
