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


class MessageState(StrEnum):
    READY = "ready"
    PROCESSING = "processing"
    DONE = "done"
    DEAD = "dead"

    def can_become(self, target: MessageState, actor: Actor = Actor.WORKER) -> bool:
        """Whether this move is legal for that actor. An operator may also do what a worker may."""
        if actor is Actor.BINDING:
            return (self, target) == (MessageState.READY, MessageState.DONE)
        return target in _BY_WORKER[self] or (actor is Actor.OPERATOR and target in _BY_OPERATOR[self])


_BY_WORKER: dict[MessageState, frozenset[MessageState]] = {
    MessageState.READY: frozenset({MessageState.PROCESSING}),  # claim
    # ack; nack, release, later, expiry; dead
    MessageState.PROCESSING: frozenset({MessageState.DONE, MessageState.READY, MessageState.DEAD}),
    MessageState.DONE: frozenset(),
    MessageState.DEAD: frozenset(),
}
_BY_OPERATOR: dict[MessageState, frozenset[MessageState]] = {
    MessageState.READY: frozenset({MessageState.DONE}),  # skip; retention, where the topic allows it
    MessageState.PROCESSING: frozenset({MessageState.READY}),  # rewind over a lease in flight
    MessageState.DONE: frozenset({MessageState.READY}),  # rewind
    MessageState.DEAD: frozenset({MessageState.READY, MessageState.DONE}),  # redrive; discard, replay
}

# What each kind of journal entry does to the messages that it names: the state that follows, and what becomes of the
# number of attempts. `None` leaves the state as it is.
JOURNAL: dict[str, tuple[MessageState | None, int | None]] = {
    "start": (MessageState.DONE, None),
    "claim": (MessageState.PROCESSING, +1),
    "pass": (MessageState.DONE, None),
    "ack": (MessageState.DONE, None),
    "nack": (MessageState.READY, None),
    "dead": (MessageState.DEAD, None),
    "later": (MessageState.READY, -1),
    "release": (MessageState.READY, -1),
    "expire": (MessageState.READY, None),
    "extend": (None, None),
    "park": (None, None),
    "redrive": (MessageState.READY, 0),
    "rewind": (MessageState.READY, 0),
    "skip": (MessageState.DONE, None),
    "free": (None, None),
    "discard": (MessageState.DONE, None),
    "replay": (MessageState.DONE, None),
    "drop": (MessageState.DONE, None),  # by retention, where the topic lets it pass what is unresolved
    # these are about a group: they name no message, and a bare group's commit is about its position
    "pause": (None, None),
    "resume": (None, None),
    "policy": (None, None),
    "commit": (None, None),
    "breaker": (None, None),
}
