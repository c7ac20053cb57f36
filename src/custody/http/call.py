"""The request that a handler serves: caller, parameters, query, body, and access to the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar
from uuid import UUID

from msgspec import UNSET

from custody.errors import InvalidArgument, TooLarge
from custody.http.asgi import Client
from custody.http.rights import Caller, Right
from custody.model.limits import LARGEST, SMALL

if TYPE_CHECKING:
    from custody.engine import Custody
    from custody.http.state import ServerState

P = ParamSpec("P")
T = TypeVar("T")


class Call:
    """What a handler gets. `body` and `query` have the operation's types; `size` is the body's size in bytes."""

    __slots__ = (
        "_body", "_client", "_engine", "_headers", "_read",
        "caller", "params", "query", "request_id", "size", "state", "worker",
    )  # fmt: skip

    def __init__(
        self,
        state: ServerState,
        *,
        caller: Caller,
        worker: str,
        request_id: str,
        params: Mapping[str, Any],
        query: Any,
        read: Callable[[], Any],
        size: int,
        headers: Mapping[bytes, bytes],
        client: Client,
    ) -> None:
        self.state, self.caller, self.worker, self.request_id = state, caller, worker, request_id
        self.params, self.query, self._read, self.size = params, query, read, size
        self._headers, self._client = headers, client
        self._body: Any = UNSET
        self._engine: Custody | None = None

    @property
    def body(self) -> Any:
        """The body. It is decoded on first use, after the rights that follow from the path or the key were checked."""
        if self._body is UNSET:
            self._body = self._read()
        return self._body

    @property
    def engine(self) -> Custody:
        """The engine, under the name of the caller."""
        if self._engine is None:
            self._engine = self.state.verbs.named(self.worker)
        return self._engine

    async def run(self, verb: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs a verb in a thread."""
        return await self.state.run(verb, *args, **kwargs)

    def allow(self, right: Right, *topics: str) -> None:
        """Refuses the call unless the caller's key has the right on these topics."""
        self.caller.require(right, topics)

    async def allow_still(self, right: Right, *topics: str) -> None:
        """`allow` with the current keys, for a caller that has waited: its key may have been revoked since."""
        caller = await self.state.authenticate(self._headers, open=False)
        caller.require(right, topics)

    def allow_everywhere(self, right: Right) -> None:
        """Refuses the call unless the caller's key has the right on all topics."""
        self.caller.require_everywhere(right)

    def require_batch(self, count: int) -> None:
        """Refuses more messages than one request may contain."""
        most = self.state.settings.max_batch
        if count > most:
            raise TooLarge(
                f"{count} messages are more than the {most} that one request may have", "Send several requests."
            )

    @property
    def topic(self) -> str:
        return str(self.params["topic"])

    @property
    def group(self) -> str:
        return str(self.params["group"])

    def number(self, name: str) -> int:
        """A whole number in the path."""
        text = self.params[name]
        if not text.isascii() or not text.isdigit() or len(text) > 19 or int(text) > LARGEST:
            raise InvalidArgument(
                f"{name} in the path cannot be {text[:100]!r}", "Give a whole number, 0 or more.", path=name
            )
        return int(text)

    def partition(self) -> int:
        number = self.number("partition")
        if number > SMALL:
            raise InvalidArgument(
                f"partition cannot be {number}", "Give a whole number below 2,147,483,648.", path="partition"
            )
        return number

    @property
    def is_gone(self) -> bool:
        """Whether the client has disconnected."""
        return self._client.lost

    async def unless_gone(self, waiting: asyncio.Future[T]) -> T | None:
        """The result, or None if the client disconnects first: then `waiting` is cancelled."""
        client, leave = self._client, waiting.cancel
        client.watching.add(leave)
        client.disregard_body()  # with an unread body nothing more would be read, not even that the client is gone
        if client.lost:
            leave()
        try:
            result = await waiting
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if client.lost and not (task and task.cancelling()):
                return None
            raise
        finally:
            client.watching.discard(leave)
        return None if client.lost else result


def lease_of_receipt(receipt: str) -> tuple[UUID, int]:
    """The lease and the offset of a receipt."""
    lease, colon, offset = receipt.partition(":")
    try:
        if colon and offset.isascii() and offset.isdigit() and len(offset) < 20 and int(offset) <= LARGEST:
            return UUID(lease), int(offset)
    except ValueError:
        pass
    raise InvalidArgument(
        f"{receipt[:100]!r} is not a receipt", "Send it unchanged, as it came with the message.", path="$.receipt"
    )
