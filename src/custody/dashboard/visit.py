"""A request of a browser: who asks, the parameters, and the verbs that it may call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from custody.engine import Custody
from custody.errors import InvalidArgument
from custody.http.rights import Caller
from custody.model.limits import LARGEST, SMALL
from custody.wire.verb import declared

if TYPE_CHECKING:
    from custody.dashboard.watch import Watch
    from custody.http.state import ServerState

P = ParamSpec("P")
T = TypeVar("T")

_VERBS = declared(Custody)


class Visit:
    """What a page gets. Parameters of path, query and form are texts; an empty one counts as absent."""

    def __init__(
        self,
        state: ServerState,
        watch: Watch,
        *,
        caller: Caller,
        worker: str,
        params: Mapping[str, str],
        query: Mapping[str, Sequence[str]],
        form: Mapping[str, Sequence[str]],
    ) -> None:
        self.state, self.watch, self.caller, self.worker = state, watch, caller, worker
        self.params, self.query, self.form = params, query, form
        self._engine = state.verbs.named(worker)

    async def ask(self, verb: Callable[Concatenate[Custody, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Calls a verb in a thread. Refused without the right that its declaration names, as over the HTTP API."""
        self._require(verb, args, kwargs)
        return await self.state.run(verb, self._engine, *args, **kwargs)

    def may(self, verb: Callable[..., object], topic: str | None = None) -> bool:
        """Whether the caller may call a verb on a topic, or on all topics."""
        right = _VERBS[verb.__name__].right
        if right == "any":
            return any(self.caller.may(one, topic) for one in ("produce", "consume", "admin"))
        return self.caller.may_everywhere(right) if topic is None else self.caller.may(right, topic)

    def _require(self, verb: Callable[..., object], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        known = _VERBS[verb.__name__]
        given = inspect.signature(verb).bind(None, *args, **kwargs).arguments
        topic = given.get(known.on or known.parameter("topic"))
        if known.right == "any":
            if topic is not None and not self.may(verb, topic):
                self.caller.require("consume", [topic])
        elif known.everywhere or topic is None:
            self.caller.require_everywhere(known.right)
        else:
            self.caller.require(known.right, [topic])

    @property
    def topic(self) -> str:
        return self.params["topic"]

    @property
    def group(self) -> str:
        return self.params["group"]

    @property
    def place(self) -> tuple[int, int]:
        """The partition and the offset in the path."""
        partition, offset = (_number(name, self.params[name], most) for name, most in _PLACE)
        return partition, offset

    def text(self, name: str) -> str | None:
        """A parameter of the form or the query."""
        given = self.form.get(name) or self.query.get(name) or ("",)
        text = given[0].strip()
        if "\0" in text:
            raise InvalidArgument(f"{name} has a NUL character", "Remove it.")
        return text or None

    def texts(self, name: str) -> Sequence[str]:
        """All values of a parameter of the form."""
        return self.form.get(name, ())

    def number(self, name: str, most: int = LARGEST) -> int | None:
        text = self.text(name)
        return None if text is None else _number(name, text, most)

    def partition(self) -> int | None:
        return self.number("partition", SMALL)

    def moment(self, name: str) -> datetime | None:
        """A time, as a browser sends it: without a zone it is UTC, as the pages show all times."""
        text = self.text(name)
        if text is None:
            return None
        try:
            found = datetime.fromisoformat(text)
        except ValueError:
            raise InvalidArgument(
                f"{name} cannot be {text[:100]!r}", "Write it as 2026-01-31T12:00, in UTC.", path=name
            ) from None
        return found if found.tzinfo is not None else found.replace(tzinfo=UTC)


_PLACE = (("partition", SMALL), ("offset", LARGEST))


def _number(name: str, text: str, most: int) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 19 or int(text) > most:
        raise InvalidArgument(f"{name} cannot be {text[:100]!r}", "Give a whole number, 0 or more.", path=name)
    return int(text)
