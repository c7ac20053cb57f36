"""Resets objects in the child process after a fork: counters, locks and sockets belong to the parent."""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Forked(Protocol):
    def forked(self) -> None:
        """Called in the child, before anything else runs there."""


_known: weakref.WeakSet[Forked] = weakref.WeakSet()


def reset_after_fork(one: Forked) -> None:
    """Has `forked` called in each child process, as long as the object lives."""
    _known.add(one)


def _tell() -> None:
    for one in list(_known):
        one.forked()


if hasattr(os, "register_at_fork"):  # pragma: no branch - elsewhere nothing forks
    os.register_at_fork(after_in_child=_tell)
