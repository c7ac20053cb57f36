"""Handlers get usable connections of Django, as views do: old and broken ones are closed before and after each call."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from asgiref.sync import sync_to_async
from django.db import close_old_connections

from custody.handlers import is_coroutine_function

_later = sync_to_async(close_old_connections)  # in the thread in which a coroutine's queries run


def with_fresh_connections(handler: Callable[..., Any]) -> Callable[..., Any]:
    """The handler with `close_old_connections` before and after: it closes what is broken or older than CONN_MAX_AGE,
    and leaves a connection in a transaction alone."""
    if is_coroutine_function(handler):

        @wraps(handler)
        async def handle_later(*given: Any) -> Any:
            await _later()
            try:
                return await handler(*given)
            finally:
                await _later()

        return handle_later

    @wraps(handler)
    def handle(*given: Any) -> Any:
        close_old_connections()
        try:
            return handler(*given)
        finally:
            close_old_connections()

    return handle
