"""What can be a handler, and what a handler may return: wrong ones are refused before they lose a message.

A function with `yield` or `async def` does nothing when it is called: it returns something that has yet to run. Taken
for the end of the work, its message would be done and nothing would have happened.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

from custody.errors import InvalidArgument


def is_coroutine_function(handler: object) -> bool:
    """Also of an object whose `__call__` is one."""
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(_call_of(handler))


def require_callable(function: object, what: str, takes: tuple[str, ...]) -> None:
    """Refuses what cannot be called with these arguments."""
    wanted = f"def {what.rpartition(' ')[2]}({', '.join(takes)})"
    if not callable(function):
        raise InvalidArgument(f"{what} is {_named(function)}, which cannot be called", f"Give it a function: {wanted}.")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # one that is written in C may not say what it takes
        return
    try:
        signature.bind(*takes)
    except TypeError as error:
        taken = ", ".join(map(str, signature.parameters.values()))
        raise InvalidArgument(
            f"{what} takes ({taken}), and is called with ({', '.join(takes)}): {error}", f"Define it as {wanted}."
        ) from None


def require_handler(handler: Callable[..., object], *, generators: bool, coroutines: bool) -> None:
    """Refuses a handler that would not run: the caller says which kinds it runs."""
    require_callable(handler, "the handler", ("message",))
    require_run(handler, "the handler", generators=generators, coroutines=coroutines)


def require_run(function: object, what: str, *, generators: bool = False, coroutines: bool = False) -> None:
    """Refuses a function of which a call does nothing."""
    call = _call_of(function)
    if any(map(inspect.isasyncgenfunction, (function, call))):
        raise InvalidArgument(f"{what} is an async generator, which nobody would run", "Use a plain function.")
    if not generators and any(map(inspect.isgeneratorfunction, (function, call))):
        raise InvalidArgument(
            f"{what} has a yield, so a call of it would not run it",
            "Nothing takes what it yields: remove the yield.",
        )
    if not coroutines and is_coroutine_function(function):
        raise InvalidArgument(
            f"{what} is a coroutine function (async def), which nobody would await here",
            "Use a plain function, and asyncio.run(…) within it where it has to await something.",
        )


def require_finished(returned: object, what: str = "the handler") -> None:
    """Refuses what a call returned if it has yet to run: nothing has been done then."""
    if inspect.iscoroutine(returned):
        returned.close()  # or Python would warn that it was never awaited
        raise TypeError(f"{what} returned a coroutine, which nobody awaits: define it with `async def`")
    if inspect.isgenerator(returned) or inspect.isasyncgen(returned):
        raise TypeError(f"{what} returned a generator, which nobody runs: nothing was done")


def _call_of(handler: object) -> object:
    return getattr(handler, "__call__", None)  # noqa: B004  # its kind is asked for, not whether it can be called


def _named(value: object) -> str:
    return "None" if value is None else f"of type {type(value).__name__}"
