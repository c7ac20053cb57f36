"""What can be a handler: refused where it is defined, so that no message is done by a function that never ran."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import Any

import pytest

from custody.errors import InvalidArgument
from custody.handlers import is_coroutine_function, require_callable, require_finished, require_handler


def plain(_message: object) -> None: ...


def generating(_message: object) -> Iterator[int]:
    yield 1


async def awaiting(_message: object) -> None: ...


async def streaming(_message: object) -> AsyncIterator[int]:
    yield 1


class Awaiting:
    async def __call__(self, _message: object) -> None: ...


class Generating:
    def __call__(self, _message: object) -> Iterator[int]:
        yield 1


@pytest.mark.parametrize("handler", [plain, partial(plain), print, lambda message, *, more=1: (message, more)])
def test_plain_functions_are_always_handlers(handler: Callable[..., object]) -> None:
    require_handler(handler, generators=False, coroutines=False)


@pytest.mark.parametrize("handler", [generating, partial(generating), Generating()])
def test_generators_are_handlers_where_they_are_run(handler: Callable[..., object]) -> None:
    require_handler(handler, generators=True, coroutines=False)
    with pytest.raises(InvalidArgument, match="a yield"):
        require_handler(handler, generators=False, coroutines=True)


@pytest.mark.parametrize("handler", [awaiting, partial(awaiting), Awaiting()])
def test_coroutine_functions_are_handlers_where_they_are_awaited(handler: Callable[..., object]) -> None:
    assert is_coroutine_function(handler)
    require_handler(handler, generators=False, coroutines=True)
    with pytest.raises(InvalidArgument, match=r"async def.*asyncio\.run"):
        require_handler(handler, generators=True, coroutines=False)


@pytest.mark.parametrize(
    ("handler", "told"),
    [
        (streaming, "an async generator"),
        (None, "is None, which cannot be called"),
        ("screen", "is of type str, which cannot be called"),
        (lambda: None, r"takes \(\), and is called with \(message\)"),
        (lambda message, context: (message, context), r"takes \(message, context\)"),
    ],
)
def test_what_can_never_be_a_handler(handler: Any, told: str) -> None:
    with pytest.raises(InvalidArgument, match=told):
        require_handler(handler, generators=True, coroutines=True)


def test_the_definition_that_is_wanted_is_said() -> None:
    with pytest.raises(InvalidArgument, match=r"Define it as def write\(rows, write\)"):
        require_callable(lambda rows: rows, "the function of write", ("rows", "write"))


def test_what_has_yet_to_run_is_not_taken_for_done() -> None:
    for returned in (None, 1, [1], (1,), "x"):
        require_finished(returned)
    for unfinished, told in (
        (awaiting(1), "coroutine"),
        (generating(1), "generator"),
        (streaming(1), "generator"),
    ):
        with pytest.raises(TypeError, match=told):
            require_finished(unfinished)
