"""The states of keys while a task runs a keyed handler. A message that fails leaves its key's state as it was.

The state of a key is kept as JSON between its messages and decoded for each, so what a failing handler has changed in
its copy is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from custody.model.entities import Message
from custody.model.outcomes import Dead
from custody.spark.database.states import Found
from custody.spark.tasks.state_type import Codec, StateType
from custody.verbs.pipelines import StagedStates

S = TypeVar("S")

NO_KEY = "the message has no key, so there is no state for it"
FOREIGN = "the key of the message belongs to another partition: a key in two partitions has no order, so no state"


class KeyState(Generic[S]):
    """The state of a message's key. What a handler does to it counts if the message is done; the next one sees it.

    The value of `get` is a copy: changes of it count only after `update`.
    """

    def __init__(self, key: str, codec: Codec, stored: bytes | None) -> None:
        self._key, self._codec, self._json = key, codec, stored
        self.changed = False
        """Whether the handler has called `update` or `clear`."""

    @property
    def json(self) -> bytes | None:
        """The state as it would be stored."""
        return self._json

    def exists(self) -> bool:
        return self._json is not None

    def get(self) -> S | None:
        """The value of the state; None if there is none."""
        return None if self._json is None else self._codec.decode(self._key, self._json)

    def update(self, value: S) -> None:
        """Replaces the state. Refuses a value that does not fit its type, and one of more than 256 kB as JSON."""
        self._json, self.changed = self._codec.encode(self._key, value), True

    def clear(self) -> None:
        """Removes the state."""
        self._json, self.changed = None, True


KeyedHandler = Callable[[Message, KeyState[Any]], object]


class Store(Protocol):
    """Where states come from, and where new ones go."""

    def read(self, partition: int, keys: Sequence[str]) -> Mapping[str, Found]: ...

    def add(self, partition: int, offset: int, key: str, state: bytes | None) -> None: ...

    def write(self) -> StagedStates | None: ...


class States:
    """The states that one attempt of a task knows."""

    def __init__(self, kind: StateType, store: Store, handler: KeyedHandler) -> None:
        self._codec, self._store, self._handler = kind.codec(), store, handler
        self._known: dict[tuple[int, str], Found] = {}
        self._current: KeyState[Any] | None = None
        self.finish = store.write

    def load(self, partition: int, keys: Iterable[str | None]) -> None:
        """Reads the states of these keys, which the next messages have, in one query."""
        wanted = {key for key in keys if key is not None and (partition, key) not in self._known}
        if wanted:
            found = self._store.read(partition, sorted(wanted))
            self._known.update({(partition, key): one for key, one in found.items()})

    def handle(self, message: Message) -> object:
        """Calls the handler with the message and the state of its key."""
        self._current = None
        if message.key is None:
            raise Dead(NO_KEY)
        found = self._known[message.partition, message.key]
        if not found.own:
            raise Dead(FOREIGN)
        self._current = KeyState(message.key, self._codec, found.state)
        return self._handler(message, self._current)

    def done(self, message: Message) -> None:
        """The message has succeeded: the next one of its key sees its state, which is staged."""
        current, self._current = self._current, None
        if current is not None and current.changed:
            assert message.key is not None
            self._known[message.partition, message.key] = Found(True, current.json)
            self._store.add(message.partition, message.offset, message.key, current.json)


class Given:
    """States for a dry run or a test, by key. What a handler makes of them is stored nowhere else."""

    def __init__(self, states: Mapping[str, bytes]) -> None:
        self._states: dict[str, bytes | None] = {**states}

    def read(self, partition: int, keys: Sequence[str]) -> dict[str, Found]:  # noqa: ARG002
        return {key: Found(True, self._states.get(key)) for key in keys}

    def add(self, partition: int, offset: int, key: str, state: bytes | None) -> None:  # noqa: ARG002
        self._states[key] = state

    def left(self) -> dict[str, bytes]:
        """The states that are there now."""
        return {key: state for key, state in self._states.items() if state is not None}

    def write(self) -> None:
        """Does nothing."""
