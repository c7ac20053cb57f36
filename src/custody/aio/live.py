"""Objects with verbs of their own, such as a lease: what the derived classes are based on.

Each is about one object of the blocking façade (`_of`), whose methods `bridge.run` runs.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeVar, overload
from uuid import UUID

from custody.bridge import run
from custody.errors import CustodyError, LeaseLost
from custody.model.entities import Delayed, Message, Receipt, Settled
from custody.model.policy import Duration
from custody.verbs.claim import Lease
from custody.verbs.producer import IdempotentProducer
from custody.verbs.transactions import Transaction, Transactions

if TYPE_CHECKING:
    from custody.aio.derived.transaction import Transaction as AsyncTransaction


class LiveLease:
    """What a lease is without its verbs."""

    def __init__(self, of: Lease) -> None:
        self._of = of

    def __bool__(self) -> bool:
        return bool(self._of)

    def __len__(self) -> int:
        return len(self._of)

    def __iter__(self) -> Iterator[Message]:
        return iter(self._of)

    def __repr__(self) -> str:
        return repr(self._of)

    @property
    def messages(self) -> Sequence[Message]:
        return self._of.messages

    @property
    def reason(self) -> str | None:
        """Why there are no messages: `empty`, `busy`, `paused`, `breaker_open`, or the limit that was reached."""
        return self._of.reason

    @property
    def detail(self) -> str | None:
        return self._of.detail

    @property
    def settled(self) -> Settled | None:
        """The answer to the lease that its claim settled first."""
        return self._of.settled

    @property
    def lost(self) -> LeaseLost | None:
        """Set if that lease no longer held all its messages."""
        return self._of.lost


class LiveTransactions:
    def __init__(self, of: Transactions) -> None:
        self._of = of


class LiveTransaction:
    """What a transaction is without its verbs: a block that commits at its end."""

    def __init__(self, of: Transaction) -> None:
        self._of = of

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await run(lambda: self._of.__exit__(kind, error, trace))

    @property
    def transaction_id(self) -> UUID:
        return self._of.transaction_id

    @property
    def expires_at(self) -> datetime:
        return self._of.expires_at

    @property
    def receipts(self) -> list[Receipt | Delayed]:
        """Set by the commit, in the order of publishing."""
        return self._of.receipts


class LiveProducer:
    """What a producer is without its verbs."""

    def __init__(self, of: IdempotentProducer) -> None:
        self._of = of

    @property
    def producer_id(self) -> str:
        return self._of.producer_id

    @property
    def epoch(self) -> int:
        return self._of.epoch

    def transaction(self, *, timeout: Duration | None = None) -> Opening[AsyncTransaction]:
        """A transaction: its publishes, to any topics, and its acks become visible together or not at all.

        It begins when it is entered (`async with producer.transaction() as t`) or awaited. It is aborted after
        `timeout` (default: 60 s), and when a newer instance of this producer takes over.
        """
        from custody.aio.derived.transaction import Transaction as AsyncTransaction

        async def begin() -> AsyncTransaction:
            return AsyncTransaction(await run(lambda: self._of.transaction(timeout=timeout)))

        return Opening(begin)


class Opened(Protocol):
    """What can be the target of `async with`."""

    async def __aenter__(self) -> Any: ...
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


OpenedT = TypeVar("OpenedT", bound=Opened)


class Opening(Generic[OpenedT]):
    """Something that opens when it is awaited, or entered by `async with`, which also ends it."""

    def __init__(self, begin: Callable[[], Awaitable[OpenedT]]) -> None:
        self._begin = begin
        self._opened: OpenedT | None = None

    def __await__(self) -> Generator[Any, None, OpenedT]:
        return self._begin().__await__()

    async def __aenter__(self) -> OpenedT:
        self._opened = await self
        return self._opened

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._opened is not None
        await self._opened.__aexit__(kind, error, trace)


@overload
def blocking(lease: LiveLease) -> Lease: ...
@overload
def blocking(lease: LiveLease | UUID | None) -> Lease | UUID | None: ...
def blocking(lease: LiveLease | UUID | None) -> Lease | UUID | None:
    """The lease of the blocking façade, for an argument of its verbs."""
    return lease._of if isinstance(lease, LiveLease) else lease


def give_back(lease: Lease) -> None:
    """Releases the messages of a claim whose task was cancelled."""
    if lease:
        with suppress(CustodyError):  # they come back when the lease expires
            lease.release()
