"""The lifecycle of a message in a group: four states, and every kind of journal entry with the transition it records.

Waiting for a backoff and waiting behind a key are not states: they are reasons why a ready message is not due. The SQL
functions make the transitions; tests compare the entries that they write with this table.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Actor(StrEnum):
    """Who makes a transition."""

    WORKER = "worker"  # claims, settles, or loses a lease
    OPERATOR = "operator"
    BINDING = "binding"  # a claim that skips messages that do not match the group's bindings


class MessageState(StrEnum):
    READY = "ready"
    PROCESSING = "processing"
    DONE = "done"
    DEAD = "dead"

    def can_become(self, target: MessageState, actor: Actor = Actor.WORKER) -> bool:
        """Whether this transition is legal for that actor. An operator may also do what a worker may."""
        actors = {actor, Actor.WORKER} if actor is Actor.OPERATOR else {actor}
        return any(one.target is target and self in one.sources and one.actor in actors for one in JOURNAL.values())


@dataclass(frozen=True)
class Kind:
    """A kind of journal entry: its text for people, and its effect on the messages that it names.

    It moves them from one of these states to another, or leaves the state unchanged. Attempts change by +1 or -1, are
    reset (0), or stay (None).
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
    "hasten": Kind("retry brought forward", Actor.OPERATOR),
    "rewind": Kind("rewound: to be delivered again", Actor.OPERATOR, (_DONE, _DEAD, _PROCESSING), _READY, 0),
    "skip": Kind("skipped: counts as done", Actor.OPERATOR, (_READY, _PROCESSING, _DEAD), _DONE),
    "free": Kind("its key was let go on", Actor.OPERATOR),
    "discard": Kind("discarded", Actor.OPERATOR, (_DEAD,), _DONE),
    "replay": Kind("replayed: published again, and done here", Actor.OPERATOR, (_DEAD,), _DONE),
    "drop": Kind("given up by retention: counts as done", Actor.OPERATOR, (_READY,), _DONE),
    # these concern a group and name no message; the commit of a bare group sets its position
    "pause": Kind("the group is paused", Actor.OPERATOR),
    "resume": Kind("the group goes on", Actor.OPERATOR),
    "policy": Kind("the policy was changed", Actor.OPERATOR),
    "commit": Kind("done by the group's position"),
    "breaker": Kind("the circuit breaker changed"),
}
