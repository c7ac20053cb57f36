"""The lifecycle over HTTP: claim, settle, and the worker."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Self
from uuid import UUID

from msgspec import UNSET

from custody.errors import LeaseLost, Withheld
from custody.model.entities import DEFAULT_GROUP, Settled
from custody.model.limits import MOST
from custody.model.outcomes import Outcome
from custody.model.policy import Duration
from custody.remote.base import RemoteBase, group_path, require_topic, topic_path
from custody.remote.listening import RemoteListener
from custody.remote.settling import RemoteSettler
from custody.remote.transport import ATTEMPT
from custody.remote.values import require_partition
from custody.verbs.claim import Again, Lease, id_of, require_lease_of
from custody.verbs.settle import lease_lost
from custody.wire import fields
from custody.wire.answers import WakeupOut
from custody.wire.messages import LeaseOut
from custody.wire.queries import ReceiveQuery, WakeupQuery
from custody.worker import Worker
from custody.worker.handler_runner import Handler

_SELDOM = "365d"


class RemoteConsuming(RemoteBase):
    """Claiming and settling messages."""

    def claim(
        self,
        topic: str,
        group: str,
        *,
        max_messages: int = 1,
        visibility_timeout: Duration | None = None,
        partition: int | None = None,
        settle: Lease | UUID | None = None,
        outcomes: Mapping[int, Outcome] | None = None,
    ) -> Lease:
        """As with a direct connection, but at most 10,000 messages at once. `settle` is part of the request, but acked
        also if there is no such group. `outcomes` are a request before it.

        If the answer is lost, the claim is repeated. What the first one leased comes back when that lease expires.
        """
        group_path(topic, group)
        require_partition(partition)
        path = f"/messages/{require_topic(topic)}" + ("" if partition is None else f"/{partition}")
        settle_id = id_of(settle)
        require_lease_of(outcomes, settle_id)
        settled, lost = self._settled_before(settle_id, outcomes)
        query = ReceiveQuery(
            group=group,
            max=min(max_messages, MOST),
            visibility_timeout=fields.Timeout.of(visibility_timeout),
            create=group != DEFAULT_GROUP,  # over HTTP a receive creates it by default; this verb does not
            ack=None if settle_id is None or outcomes is not None else str(settle_id),
        )
        again = partial(
            self.claim,
            topic,
            group,
            max_messages=max_messages,
            visibility_timeout=visibility_timeout,
            partition=partition,
        )
        try:
            found = self._call("GET", path, LeaseOut, query=query, **self._patience.get("claim", {}))
            lease = self._lease(found, again)
            if found.settled is not UNSET:
                lease.settled = found.settled.value()
            if found.lost is not UNSET:
                lease.lost = lease_lost(settle_id, found.lost)
        except Withheld as error:
            nothing = LeaseOut(lease_id=None, deadline=None, messages=[], reason=error.code)
            lease = self._lease(nothing, again, error)
        if outcomes is not None:
            lease.settled, lease.lost = settled, lost
        return lease

    def _settled_before(
        self, lease_id: UUID | None, outcomes: Mapping[int, Outcome] | None
    ) -> tuple[Settled | None, LeaseLost | None]:
        if lease_id is None or outcomes is None:
            return None, None
        try:
            return self._settler().settle(lease_id, outcomes), None
        except LeaseLost as error:
            return None, error

    def _lease(self, found: LeaseOut, again: Again, withheld: Withheld | None = None) -> Lease:
        return Lease(
            self._settler(),
            lease_id=found.lease_id,
            deadline=found.deadline,
            messages=[message.value() for message in found.messages],
            reason=found.reason,
            detail=found.detail if withheld is None else _detail(withheld),
            again=again,
        )

    def _settler(self, connection: Any = None) -> RemoteSettler:
        return RemoteSettler(worker=self.worker, connection=connection, transport=self._transport)

    def worker_for(self, topic: str, group: str, handler: Handler, **settings: Any) -> Worker:
        """As with a direct connection. The server does the upkeep of the log."""
        return Worker(self._impatient(), topic, group, handler, **{"upkeep": _SELDOM, **settings})

    def ticking(self) -> AbstractContextManager[None]:
        """Does nothing: the server publishes the ticks of schedules."""
        return nullcontext()

    def _impatient(self) -> Self:
        """A copy that does not retry claims: the worker retries itself, so that it can stop meanwhile."""
        other = copy.copy(self)
        other._patience = {name: {"retry_for": 0.0, "timeout": ATTEMPT} for name in ("claim", "next_due")}
        return other

    def listen(self, topic: str, wake: Callable[[], None]) -> Callable[[], None]:
        """Calls `wake` soon after each publish to the topic, from another thread. Returns a function that ends it."""
        path = topic_path(topic) + "/wakeups"

        def ask(token: str | None, wait: float) -> WakeupOut:
            query = WakeupQuery(since=token, wait=fields.Duration(wait))
            return self._call("GET", path, WakeupOut, query=query, retry_for=0.0, timeout=ATTEMPT + wait)

        listener = RemoteListener(ask, wake)
        self._listeners.add(listener)
        return listener.close


def _detail(withheld: Withheld) -> str | None:
    """The server's addition to the reason, if any: "a bad deploy" in `The group is paused: a bad deploy`."""
    said = (type(withheld).__doc__ or "").strip().rstrip(".")
    return withheld.message.removeprefix(f"{said}: ") if withheld.message.startswith(f"{said}: ") else None
