"""The lifecycle of a message in a group: four states, and every kind of journal entry, with the move that it records.

Waiting for a backoff and waiting behind a key are not states: they are reasons why a ready message is not due. The SQL
functions make the moves; tests compare the kinds that they write, and fold their entries, with this table.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Actor(StrEnum):
    """Who makes a move."""

    WORKER = "worker"  # claims, settles, or loses a lease
    OPERATOR = "operator"
    BINDING = "binding"  # a claim that passes over what its group is not bound to


class MessageState(StrEnum):
    READY = "ready"
    PROCESSING = "processing"
    DONE = "done"
    DEAD = "dead"

    def can_become(self, target: MessageState, actor: Actor = Actor.WORKER) -> bool:
        """Whether this move is legal for that actor. An operator may also do what a worker may."""
        actors = {actor, Actor.WORKER} if actor is Actor.OPERATOR else {actor}
        return any(one.target is target and self in one.sources and one.actor in actors for one in JOURNAL.values())


@dataclass(frozen=True)
class Kind:
    """A kind of journal entry: what it says to people, and what it does to the messages that it names.

    From one of these states to another, unless it leaves the state as it is; and what becomes of the attempts: +1 or
    -1, 0 for a fresh start, None if they stay.
    """

    words: str
    actor: Actor = Actor.WORKER
    sources: tuple[MessageState, ...] = ()
    target: MessageState | None = None
    attempts: int | None = None


_READY, _PROCESSING, _DONE, _DEAD = MessageState

JOURNAL: dict[str, Kind] = {
    "start": Kind("before the group's start: counts as done", Actor.OPERATOR, (_READY,), _DONE),
    "claim": Kind("claimed", Actor.WORKER, (_READY,), _PROCESSING, +1),
    "pass": Kind("passed over: the group is not bound to it", Actor.BINDING, (_READY,), _DONE),
    "ack": Kind("done", Actor.WORKER, (_PROCESSING,), _DONE),
    "nack": Kind("failed", Actor.WORKER, (_PROCESSING,), _READY),
    "dead": Kind("dead", Actor.WORKER, (_PROCESSING,), _DEAD),
    "later": Kind("put off", Actor.WORKER, (_PROCESSING,), _READY, -1),
    "release": Kind("given back", Actor.WORKER, (_PROCESSING,), _READY, -1),
    "expire": Kind("lease expired", Actor.WORKER, (_PROCESSING,), _READY),
    "extend": Kind("lease extended"),
    "park": Kind("waits behind its key"),
    "redrive": Kind("redriven: ready with a fresh budget", Actor.OPERATOR, (_DEAD,), _READY, 0),
    "rewind": Kind("rewound: to be delivered again", Actor.OPERATOR, (_DONE, _DEAD, _PROCESSING), _READY, 0),
    "skip": Kind("skipped: counts as done", Actor.OPERATOR, (_READY, _DEAD), _DONE),
    "free": Kind("its key was let go on", Actor.OPERATOR),
    "discard": Kind("discarded", Actor.OPERATOR, (_DEAD,), _DONE),
    "replay": Kind("replayed: published again, and done here", Actor.OPERATOR, (_DEAD,), _DONE),
    "drop": Kind("given up by retention: counts as done", Actor.OPERATOR, (_READY,), _DONE),
    # these are about a group: they name no message, and a bare group's commit is about its position
    "pause": Kind("the group is paused", Actor.OPERATOR),
    "resume": Kind("the group goes on", Actor.OPERATOR),
    "policy": Kind("the policy was changed", Actor.OPERATOR),
    "commit": Kind("done by the group's position"),
    "breaker": Kind("the circuit breaker changed"),
}
