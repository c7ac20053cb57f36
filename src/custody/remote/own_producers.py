"""The client's own producers. They make publishes idempotent, so that the client can repeat them after a lost
answer."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from typing import Protocol, TypeVar

from custody.errors import (
    CustodyError,
    DatabaseUnavailable,
    ProducerFenced,
    ProducerNotFound,
    SequenceConflict,
    Terminal,
    Transient,
)
from custody.forking import reset_after_fork
from custody.remote.transport import ATTEMPT, Tries

T = TypeVar("T")


class OwnProducer:
    """A producer of the client. It publishes one batch at a time. Without an epoch it has to be initialised first."""

    def __init__(self) -> None:
        self.producer_id = f"client-{uuid.uuid4().hex}"
        self.epoch: int | None = None
        self.sequence = 0
        self.unsure = False
        """A publish had no answer: it may have arrived, or may still arrive."""


Publish = Callable[[str, int, int, Tries], T]
"""Publishes under a producer's id, epoch and sequence."""


class Forget(Protocol):
    def __call__(self, producer_id: str, **patience: float) -> object:
        """Removes a producer from the server, which then refuses publishes with its id."""


class OwnProducers:
    """As many producers as there were concurrent publishes. `init` returns a new epoch."""

    def __init__(self, init: Callable[[str], int], forget: Forget) -> None:
        self._init, self._forget = init, forget
        self._idle: list[OwnProducer] = []
        self._unsure: list[OwnProducer] = []
        self._lock = threading.Lock()
        reset_after_fork(self)

    def forked(self) -> None:
        """Leaves the idle producers to the parent, which goes on with their sequences. The child must not forget them.

        The unsure ones stay: no process goes on with them.
        """
        self._idle, self._lock = [], threading.Lock()

    def publish(self, count: int, send: Publish[T]) -> T:
        """Sends `count` messages under a producer that no other thread uses meanwhile."""
        self._fence()
        with self._lock:
            producer = self._idle.pop() if self._idle else OwnProducer()
        try:
            return self._publish(producer, count, send)
        finally:
            with self._lock:
                (self._unsure if producer.unsure else self._idle).append(producer)

    def _fence(self) -> None:
        """Forgets unsure producers, so that a publish that is still on its way cannot arrive after this one.

        Several threads may do that for the same producer. It does no harm, and none waits for the others.
        """
        for producer in list(self._unsure):
            self._forget(producer.producer_id)
            with self._lock:
                if producer in self._unsure:
                    self._unsure.remove(producer)

    def _publish(self, producer: OwnProducer, count: int, send: Publish[T]) -> T:
        if producer.epoch is not None:
            try:
                return self._send(producer, count, send)
            except (ProducerNotFound, ProducerFenced, SequenceConflict):
                # nothing was published: the database has forgotten this producer, or was restored to an earlier state
                producer.epoch = None
        producer.epoch, producer.sequence = self._init(producer.producer_id), 0
        return self._send(producer, count, send)

    def _send(self, producer: OwnProducer, count: int, send: Publish[T]) -> T:
        assert producer.epoch is not None
        tries = Tries()
        try:
            answer = send(producer.producer_id, producer.epoch, producer.sequence, tries)
        except BaseException as error:
            producer.unsure = tries.unknown or not _nothing_done(error)
            if tries.unknown and isinstance(error, CustodyError):
                raise unknown_publish(error) from error
            raise
        producer.sequence += count
        return answer

    def close(self) -> None:
        """Removes the producers from the server, if it can be reached. A row that stays does no harm."""
        with self._lock:
            known, self._unsure, self._idle = self._unsure + self._idle, [], []
        for producer in known:
            try:
                self._forget(producer.producer_id, retry_for=0.0, timeout=ATTEMPT)
            except DatabaseUnavailable:
                return
            except CustodyError:
                continue  # it may work for the next one


def _nothing_done(error: BaseException) -> bool:
    """Whether an error is known to mean that nothing was published."""
    return isinstance(error, Terminal | Transient) and not isinstance(error, DatabaseUnavailable)


def unknown_publish(error: CustodyError) -> DatabaseUnavailable:
    """The error after an attempt without an answer: a refusal of the next one does not tell what the first one did."""
    if isinstance(error, DatabaseUnavailable):
        return error
    return DatabaseUnavailable(
        f"it is unknown whether this was published: an attempt got no answer, and the next was refused ({error.code}:"
        f" {error.message.rstrip('.')})",
        "Read the topic before you publish again.",
    )
