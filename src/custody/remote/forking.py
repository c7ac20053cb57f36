"""After a fork the child begins anew: what counts, locks or holds a socket belongs to the parent."""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Forked(Protocol):
    def forked(self) -> None:
        """Called in the child, before anything else runs there."""


_known: weakref.WeakSet[Forked] = weakref.WeakSet()


def tell_of_forks(one: Forked) -> None:
    """As long as it lives, it is told in each child."""
    _known.add(one)


def _tell() -> None:
    for one in list(_known):
        one.forked()


if hasattr(os, "register_at_fork"):  # pragma: no branch - elsewhere nothing forks
    os.register_at_fork(after_in_child=_tell)
