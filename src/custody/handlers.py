"""Checks handlers and what they return, so that a wrong handler does not lose messages.

A function with `yield` or `async def` does not run when it is called: it returns an object that has yet to run. If that
counted as success, the message would be done although nothing has happened.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from custody.errors import InvalidArgument
from custody.model.outcomes import Decision
from custody.model.typed import require_type

F = TypeVar("F", bound=Callable[..., Any])

Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]
_wrappers: list[Wrapper] = []


def wrap_each(wrapper: Wrapper) -> None:
    """Has each handler that a worker of this process starts with from now on wrapped, as frameworks need it."""
    if wrapper not in _wrappers:
        _wrappers.append(wrapper)


def wrapped(handler: Callable[..., Any]) -> Callable[..., Any]:
    """The handler with all that wraps it."""
    for wrapper in _wrappers:
        handler = wrapper(handler)
    return handler


def handler(*, payload: type) -> Callable[[F], F]:
    """Decorates a handler that wants payloads of a type: a worker decodes each before the call.

    A payload that does not fit makes its message dead at once, with the path of the field as its error.
    """
    require_type(payload)

    def decorate(function: F) -> F:
        function.__payload__ = payload  # type: ignore[attr-defined]
        return function

    return decorate


def payload_of(handler: object, given: type | None = None) -> type | None:
    """The type of payloads that a handler wants: the given one, or that of its decorator."""
    if given is not None:
        require_type(given)
        return given
    return getattr(handler, "__payload__", None)


def is_coroutine_function(handler: object) -> bool:
    """Whether a handler is a coroutine function, or an object whose `__call__` is one."""
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(_call_of(handler))


def require_callable(function: object, what: str, takes: tuple[str, ...]) -> None:
    """Refuses an object that cannot be called with these arguments."""
    wanted = f"def {what.rpartition(' ')[2]}({', '.join(takes)})"
    if not callable(function):
        raise InvalidArgument(f"{what} is {_named(function)}, which cannot be called", f"Give it a function: {wanted}.")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a function written in C may have no signature
        return
    try:
        signature.bind(*takes)
    except TypeError as error:
        taken = ", ".join(map(str, signature.parameters.values()))
        raise InvalidArgument(
            f"{what} takes ({taken}), and is called with ({', '.join(takes)}): {error}", f"Define it as {wanted}."
        ) from None


def require_handler(handler: Callable[..., object], *, generators: bool, coroutines: bool) -> None:
    """Refuses a handler of a kind that the caller does not run."""
    require_callable(handler, "the handler", ("message",))
    require_run(handler, "the handler", generators=generators, coroutines=coroutines)


def require_run(function: object, what: str, *, generators: bool = False, coroutines: bool = False) -> None:
    """Refuses a function that does not run when it is called."""
    call = _call_of(function)
    if any(map(inspect.isasyncgenfunction, (function, call))):
        raise InvalidArgument(f"{what} is an async generator, which would not be run", "Use a plain function.")
    if not generators and any(map(inspect.isgeneratorfunction, (function, call))):
        raise InvalidArgument(
            f"{what} has a yield, so calling it would not run it",
            "Remove the yield: the values are not used.",
        )
    if not coroutines and is_coroutine_function(function):
        raise InvalidArgument(
            f"{what} is a coroutine function (async def), which would not be awaited here",
            "Use a plain function, with asyncio.run(…) in it where it has to await something.",
        )


def require_finished(returned: object, what: str = "the handler") -> None:
    """Refuses a result that has yet to run, such as a coroutine: nothing has been done then. Raises a decision."""
    if inspect.iscoroutine(returned):
        returned.close()  # otherwise Python warns that it was never awaited
        raise TypeError(f"{what} returned a coroutine, which is not awaited: define it with `async def`")
    if isinstance(returned, Decision):
        raise returned  # otherwise the message would be done
    if inspect.isgenerator(returned) or inspect.isasyncgen(returned):
        raise TypeError(f"{what} returned a generator, which is not run: nothing was done")


def _call_of(handler: object) -> object:
    return getattr(handler, "__call__", None)  # noqa: B004  # to inspect its kind, not to test for callability


def _named(value: object) -> str:
    return "None" if value is None else f"of type {type(value).__name__}"
