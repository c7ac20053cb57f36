"""What a row needs of a peer: publish for so long, take for so long, and say what a confirmation is worth."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from bench.stage import Stage

PREFETCH = 100
"""Messages that a consumer has at hand where each is handled alone."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """What the callers of a peer do: messages of so many bytes, so many in a call, for so long."""

    bytes: int
    batch: int = 1
    callers: int = 1
    groups: int = 1
    seconds: float


@dataclass(frozen=True)
class Done:
    """What came of a load."""

    messages: int
    seconds: float

    @property
    def rate(self) -> float:
        return self.messages / self.seconds if self.messages else 0.0


class Peer(Protocol):
    """A queue that runs. Connections are opened before the time of a load begins."""

    version: str
    durability: str
    """What is on disk when a publish is confirmed, and when a message is acknowledged."""

    def empty(self, groups: int) -> None:
        """Removes all messages. From then on each message is for so many groups of consumers."""

    def publish(self, load: Load) -> Done:
        """Publishes batches, each confirmed before the next of the same caller."""

    def consume(self, load: Load, group: int) -> Done:
        """Takes and acknowledges batches until none is left, or the time is over."""

    def handle(self, load: Load) -> Done:
        """Handles messages one at a time with so many handlers, by what the peer has for that: its worker, or clients
        that fetch up to `PREFETCH` ahead."""


class NotInstalled(Exception):
    """The peer is not on this machine; the message is how to install it."""


OpenPeer = Callable[[Stage], AbstractContextManager[Peer]]
