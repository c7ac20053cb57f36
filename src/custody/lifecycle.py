"""The lifecycle of a message in a group: four states, and the only moves between them.

Waiting for a backoff and waiting behind a key are not states: they are reasons why a ready message is not due.
"""

from __future__ import annotations

from enum import StrEnum


class Actor(StrEnum):
    """Who makes a move."""

    WORKER = "worker"  # claims, settles, or loses a lease
    OPERATOR = "operator"
    BINDING = "binding"  # a claim that passes over what its group is not bound to


class State(StrEnum):
    READY = "ready"
    PROCESSING = "processing"
    DONE = "done"
    DEAD = "dead"

    def can_become(self, target: State, actor: Actor = Actor.WORKER) -> bool:
        """Whether this move is legal for that actor. An operator may also do what a worker may."""
        if actor is Actor.BINDING:
            return (self, target) == (State.READY, State.DONE)
        return target in _BY_WORKER[self] or (actor is Actor.OPERATOR and target in _BY_OPERATOR[self])


_BY_WORKER: dict[State, frozenset[State]] = {
    State.READY: frozenset({State.PROCESSING}),  # claim
    State.PROCESSING: frozenset({State.DONE, State.READY, State.DEAD}),  # ack; nack, release, later, expiry; dead
    State.DONE: frozenset(),
    State.DEAD: frozenset(),
}
_BY_OPERATOR: dict[State, frozenset[State]] = {
    State.READY: frozenset({State.DONE}),  # skip; retention, where the topic allows it
    State.PROCESSING: frozenset({State.READY}),  # rewind over a lease in flight
    State.DONE: frozenset({State.READY}),  # rewind
    State.DEAD: frozenset({State.READY, State.DONE}),  # redrive; discard, replay
}

# What each kind of journal entry does to the messages that it names: the state that follows, and what becomes of the
# number of attempts. `None` leaves the state as it is.
JOURNAL: dict[str, tuple[State | None, int | None]] = {
    "start": (State.DONE, None),
    "claim": (State.PROCESSING, +1),
    "pass": (State.DONE, None),
    "ack": (State.DONE, None),
    "nack": (State.READY, None),
    "dead": (State.DEAD, None),
    "later": (State.READY, -1),
    "release": (State.READY, -1),
    "expire": (State.READY, None),
    "extend": (None, None),
    "park": (None, None),
    "redrive": (State.READY, 0),
    "rewind": (State.READY, 0),
    "skip": (State.DONE, None),
    "free": (None, None),
    "discard": (State.DONE, None),
    "replay": (State.DONE, None),
    "drop": (State.DONE, None),  # by retention, where the topic lets it pass what is unresolved
    # these are about a group: they name no message, and a bare group's commit is about its position
    "pause": (None, None),
    "resume": (None, None),
    "policy": (None, None),
    "commit": (None, None),
    "breaker": (None, None),
}
