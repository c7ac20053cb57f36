"""One call of a verb by a command: its arguments, a confirmation before it, and its result on the terminal."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from copy import copy
from functools import cached_property
from types import TracebackType
from typing import Any, Generic, Self, TypeVar, cast

from custody.cli import render
from custody.cli.session import Session

R = TypeVar("R")


class Call(Generic[R]):
    """A verb with the arguments of the command line. It connects when it is used first, and closes with the command."""

    def __init__(
        self,
        session: Session,
        verb: str,
        opened: Callable[[Session], AbstractContextManager[Any]],
        given: Mapping[str, Any],
        places: Mapping[str, str],
        *,
        yes: bool = False,
    ) -> None:
        self.session, self.given = session, given
        self._verb, self._opened, self._places, self._yes = verb, opened, places, yes
        self._until_the_end = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._until_the_end.__exit__(kind, error, trace)

    @cached_property
    def c(self) -> Any:
        """What has the verb: Custody, or a part of it."""
        return self._until_the_end.enter_context(self._opened(self.session))

    def __call__(self, **changes: Any) -> R:
        """Calls the verb with what was given; `changes` replace arguments, or add some."""
        return cast(R, getattr(self.c, self._verb)(**{**self.given, **changes}))

    def of(self, verb: str, *, without: Collection[str] = ()) -> Call[R]:
        """The call of another verb with the same arguments, or some of them."""
        other = copy(self)
        vars(other)["c"] = self.c  # the same connection
        other._verb = verb
        other.given = {name: value for name, value in self.given.items() if name not in without}
        return other

    def confirmed(self, question: Callable[[R], str | None]) -> R:
        """Runs the verb dry, asks, and then runs it; with --dry-run only the first. No question: nothing to do."""
        found = self(dry_run=True)
        asked = None if self.given.get("dry_run") else question(found)
        if asked is not None:
            self.confirm(asked)
            found = self()
        return found

    def confirm(self, question: str) -> None:
        """Asks, unless --yes was given."""
        self.session.confirm(question, yes=self._yes)

    def report(self, text: str, **fields: object) -> None:
        """Says what was done. As JSON: the arguments that say where, and the fields."""
        if self.session.json:
            where = {written: self.given[name] for name, written in self._places.items()}
            self.session.emit({**where, **fields})
        self.session.say(text)

    def show(self, found: object, text: str) -> None:
        """Prints a result as JSON, or says what was done."""
        if self.session.json:
            self.session.emit(found)
        self.session.say(text)

    def listing(self, found: Sequence[Any], columns: Sequence[render.Column], *, empty: str = "") -> None:
        """Prints a list: as JSON, or as a table."""
        if self.session.json:
            self.session.emit(found)
        else:
            self.session.table(*render.columns(columns, found), empty=empty)
