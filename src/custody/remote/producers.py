"""The client's own producers: what it publishes is idempotent, so that it can be sent again after a lost answer."""

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
from custody.remote.forking import tell_of_forks
from custody.remote.transport import ATTEMPT, Tries

T = TypeVar("T")


class OwnProducer:
    """One of them. It publishes one batch at a time; without an epoch it has to be initialised first."""

    def __init__(self) -> None:
        self.producer_id = f"client-{uuid.uuid4().hex}"
        self.epoch: int | None = None
        self.sequence = 0
        self.unsure = False
        """Something of it may have arrived, or still be on its way."""


Publish = Callable[[str, int, int, Tries], T]
"""Publishes under a producer's id, epoch and sequence."""


class Forget(Protocol):
    def __call__(self, producer_id: str, **patience: float) -> object:
        """Drops a producer at the server: what comes under its name after that is refused."""


class OwnProducers:
    """As many as publishes were ever under way at once. `init` returns a new epoch."""

    def __init__(self, init: Callable[[str], int], forget: Forget) -> None:
        self._init, self._forget = init, forget
        self._idle: list[OwnProducer] = []
        self._unsure: list[OwnProducer] = []
        self._lock = threading.Lock()
        tell_of_forks(self)

    def forked(self) -> None:
        """Those that are idle stay the parent's, which goes on with their sequences: none of them is forgotten here.

        Nobody goes on with the others.
        """
        self._idle, self._lock = [], threading.Lock()

    def publish(self, count: int, send: Publish[T]) -> T:
        """Sends `count` messages under a producer that nobody else uses meanwhile."""
        self._fence()
        with self._lock:
            producer = self._idle.pop() if self._idle else OwnProducer()
        try:
            return self._publish(producer, count, send)
        finally:
            with self._lock:
                (self._unsure if producer.unsure else self._idle).append(producer)

    def _fence(self) -> None:
        """Whatever is still on its way must not arrive after what is published now, whichever thread sent it.

        Several threads may do it for the same producer: it does no harm, and none of them waits for the others.
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
                # refused at the first attempt, so nothing was published: the database has forgotten this producer,
                # or has been restored to an earlier state
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
        """Drops them at the server too, if it can be reached: a row that stays is of no harm."""
        with self._lock:
            known, self._unsure, self._idle = self._unsure + self._idle, [], []
        for producer in known:
            try:
                self._forget(producer.producer_id, retry_for=0.0, timeout=ATTEMPT)
            except DatabaseUnavailable:
                return
            except CustodyError:
                continue  # the next one may be let go


def _nothing_done(error: BaseException) -> bool:
    """Whether an error is one of those that are known to refuse a publish whole."""
    return isinstance(error, Terminal | Transient) and not isinstance(error, DatabaseUnavailable)


def unknown_publish(error: CustodyError) -> DatabaseUnavailable:
    """After an attempt without an answer even a refusal of the next one leaves open what the first one did."""
    if isinstance(error, DatabaseUnavailable):
        return error
    return DatabaseUnavailable(
        f"whether it was published is unknown: an attempt got no answer, and the next one was refused ({error.code}:"
        f" {error.message.rstrip('.')})",
        "Look into the topic before you publish it again.",
    )
