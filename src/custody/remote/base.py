"""The base of every part of the client: the transport, and paths."""

from __future__ import annotations

import re
from typing import Any, Self, TypeVar
from weakref import WeakSet

from custody.config import this_process
from custody.engine import Custody
from custody.errors import CustodyError, GroupNotFound, NeedsDatabase, OffsetOutOfRange, TopicNotFound
from custody.forking import reset_after_fork
from custody.model.entities import NAME
from custody.model.placement import Layout
from custody.model.policy import Policy
from custody.remote.listening import RemoteListener
from custody.remote.transport import ATTEMPT, Method, Transport
from custody.wire.reports import TopicOut

T = TypeVar("T")

REMEDY = "Open Custody with the postgresql:// URL of the database for this."

is_name = re.compile(NAME).fullmatch


class RemoteBase(Custody):
    """An open client, with the name that the journal records as the actor."""

    def __init__(self, transport: Transport, *, defaults: Policy | None = None, worker: str | None = None) -> None:
        # does not call the base class, which needs a database
        self._transport = transport
        self._defaults = defaults or Policy()
        self._layouts: dict[str, Layout] = {}
        self._patience: dict[str, dict[str, float]] = {}
        """Arguments of `Transport.call` for single verbs, such as a shorter timeout."""
        self._listeners: WeakSet[RemoteListener] = WeakSet()
        self._this_process = this_process()
        self.worker = worker or self._this_process
        reset_after_fork(self)

    def forked(self) -> None:
        """Gives the child process a name of its own, unless the user gave one."""
        parent, self._this_process = self._this_process, this_process()
        if self.worker == parent:
            self.worker = self._this_process

    def __copy__(self) -> Self:
        """A copy that shares the transport. It is registered for forks too."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        reset_after_fork(other)
        return other

    def __repr__(self) -> str:
        return f"<Custody at {self._transport.address.url}>"

    def close(self) -> None:
        """Closes the connections, and ends what listens."""
        for listener in list(self._listeners):
            listener.close()
        self._transport.close()

    @property
    def database_url(self) -> str:
        """Always raises: the outbox and pipelines on Spark need a direct connection."""
        raise NeedsDatabase("a client does not know the database of its server", REMEDY)

    def ping(self) -> None:
        """Raises if the server or its database does not answer."""
        self._call("GET", "/readyz", type(None), retry_for=0.0, timeout=ATTEMPT)

    def _call(self, method: Method, path: str, answer: type[T], **given: Any) -> T:
        return self._transport.call(method, path, answer, worker=self.worker, **given)

    def _layout_of(self, topic: str) -> Layout:
        layout = self._layouts.get(topic)
        if layout is None:
            found = self._call("GET", topic_path(topic), TopicOut).value()
            layout = self._layouts[topic] = Layout(found.partitions, found.priorities)
        return layout

    def _require_offset(self, path: str, offset: int | None, refusal: type[CustodyError] = OffsetOutOfRange) -> None:
        """Refuses a negative offset as the verb itself does, after checking that the topic or group at `path` exists.

        In a request the server would refuse it as an invalid field.
        """
        if offset is not None and offset < 0:
            self._call("GET", path, dict[str, Any])
            raise refusal(f"there is nothing at {offset}", "Offsets begin with 0.")


def topic_path(topic: str) -> str:
    """The path of a topic. A text that cannot be a name is refused like a topic that does not exist."""
    return f"/topics/{require_topic(topic)}"


def require_topic(topic: str) -> str:
    if not is_name(topic):
        raise TopicNotFound(f"there is no topic {topic!r}", "Create it first.")
    return topic


def group_path(topic: str, group: str) -> str:
    path = topic_path(topic)
    if not is_name(group):
        raise GroupNotFound(f"topic {topic!r} has no group {group!r}", "Create it first.")
    return f"{path}/groups/{group}"
