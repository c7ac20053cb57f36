"""One request on its way: who asks, what for, and the means to answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar
from uuid import UUID

from msgspec import UNSET

from custody.errors import InvalidArgument, TooLarge
from custody.http.asgi import Receive
from custody.http.rights import Caller, Right

if TYPE_CHECKING:
    from custody.engine import Custody
    from custody.http.state import ServerState

P = ParamSpec("P")
T = TypeVar("T")


class Call:
    """What a handler gets. `body` and `query` are of the operation's types; `size` is that of the body, in bytes."""

    __slots__ = (
        "_body", "_engine", "_headers", "_read", "_receive",
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
        receive: Receive,
    ) -> None:
        self.state, self.caller, self.worker, self.request_id = state, caller, worker, request_id
        self.params, self.query, self._read, self.size = params, query, read, size
        self._headers, self._receive = headers, receive
        self._body: Any = UNSET
        self._engine: Custody | None = None

    @property
    def body(self) -> Any:
        """The body, decoded when it is first asked for: rights that the path or the key alone can tell come before."""
        if self._body is UNSET:
            self._body = self._read()
        return self._body

    @property
    def engine(self) -> Custody:
        """The engine, under the name of whoever asks."""
        if self._engine is None:
            self._engine = self.state.verbs.named(self.worker)
        return self._engine

    async def run(self, verb: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """A verb, in a thread."""
        return await self.state.run(verb, *args, **kwargs)

    def allow(self, right: Right, *topics: str) -> None:
        """Refuses what the caller's key has no right to do with these topics."""
        self.caller.require(right, topics)

    async def allow_still(self, right: Right, *topics: str) -> None:
        """The same by the keys as they are now, for a caller that has waited: its key may have been revoked."""
        caller = await self.state.authenticate(self._headers, open=False)
        caller.require(right, topics)

    def allow_everywhere(self, right: Right) -> None:
        """Refuses what concerns all topics, if the caller's key is not for all of them."""
        self.caller.require_everywhere(right)

    def require_batch(self, count: int) -> None:
        """Refuses more messages than one request may name."""
        most = self.state.settings.max_batch
        if count > most:
            raise TooLarge(f"{count} messages are more than the {most} that one request may have", "Send several.")

    @property
    def topic(self) -> str:
        return str(self.params["topic"])

    @property
    def group(self) -> str:
        return str(self.params["group"])

    def number(self, name: str) -> int:
        """A whole number in the path."""
        text = self.params[name]
        if not text.isascii() or not text.isdigit() or len(text) > 19 or int(text) > 2**62:
            raise InvalidArgument(
                f"{name} in the path cannot be {text[:100]!r}", "It is a whole number from 0 on.", path=name
            )
        return int(text)

    def partition(self) -> int:
        number = self.number("partition")
        if number >= 2**31:
            raise InvalidArgument(
                f"partition cannot be {number}", "It is a whole number below 2,147,483,648.", path="partition"
            )
        return number

    async def gone(self) -> None:
        """Returns when the client has gone away."""
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                return

    async def is_gone(self) -> bool:
        """Whether the client has gone away already."""
        watch = asyncio.ensure_future(self.gone())
        await asyncio.sleep(0)  # it runs until it would have to wait
        watch.cancel()
        return watch.done()

    async def unless_gone(self, waiting: asyncio.Future[T]) -> T | None:
        """The result, or None if the client goes away first."""
        watch = asyncio.ensure_future(self.gone())
        both: set[asyncio.Future[Any]] = {waiting, watch}
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            watch.cancel()
        return waiting.result() if waiting.done() and not watch.done() else None


def lease_of_receipt(receipt: str) -> tuple[UUID, int]:
    """The lease and the offset that a receipt stands for."""
    lease, colon, offset = receipt.partition(":")
    try:
        if colon and offset.isascii() and offset.isdigit() and len(offset) < 20 and int(offset) <= 2**62:
            return UUID(lease), int(offset)
    except ValueError:
        pass
    raise InvalidArgument("that is not a receipt", "Send it back as it came with the message.", path="$.receipt")
