"""Operations: method, path, types of body, query and answer, handler. Routes and the API description are made of
them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec

from custody.errors import InvalidJson
from custody.wire import fields
from custody.wire.queries import NoQuery
from custody.wire.requests import Shape, at_most

if TYPE_CHECKING:
    from custody.http.call import Call

Handler = Callable[["Call"], Awaitable[object]]


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One call of the API. Without a `body` type no body is read. An `open` operation needs no key."""

    method: str
    path: str
    name: str
    summary: str
    description: str
    tag: str
    handler: Handler
    answer: Any
    status: int
    body: type[Shape] | None
    body_required: bool
    query: type[Shape]
    example: Any
    open: bool
    media_type: str = "application/json"
    other: dict[int, Any] = field(default_factory=dict)
    decode: Callable[[bytes], Any] = field(init=False, repr=False)

    @cached_property
    def reads(self) -> bool:
        """Whether its answer may be large, so that it waits for memory first. Receives do that before each claim."""
        return self.method == "GET" and not self.open and "wait" not in self.query.__struct_fields__

    def __post_init__(self) -> None:
        decoder = msgspec.json.Decoder(Any if self.body is None else self.body, dec_hook=fields.read)
        object.__setattr__(self, "decode", decoder.decode)

    def read(self, given: bytes, most: int) -> Any:
        """Decodes the body, with at most `most` messages. None if it is empty and not required."""
        if given:
            with at_most(most + 1):  # one more, because the body itself may count as one
                return self.decode(given)
        if self.body is not None and self.body_required:
            raise InvalidJson("the body is empty", "Send a JSON object.")
        return None


def described(function: Callable[..., object]) -> tuple[str, str]:
    """Splits a docstring into summary and description."""
    summary, _, description = (function.__doc__ or "").strip().partition("\n\n")
    return " ".join(summary.split()), " ".join(description.split())


class Table:
    """The operations of one module."""

    def __init__(self, tag: str) -> None:
        self.tag = tag
        self.operations: list[Operation] = []

    def operation(
        self,
        method: str,
        path: str,
        *,
        answer: Any,
        status: int = 200,
        body: type[Shape] | None = None,
        body_required: bool = True,
        query: type[Shape] = NoQuery,
        example: Any = None,
        open: bool = False,
        media_type: str = "application/json",
        other: dict[int, Any] | None = None,
    ) -> Callable[[Handler], Handler]:
        """Decorates a handler. Its name is that of the operation, its docstring the description."""

        def add(handler: Handler) -> Handler:
            summary, description = described(handler)
            self.operations.append(
                Operation(
                    method=method,
                    path=path,
                    name=getattr(handler, "__name__", path),
                    summary=summary,
                    description=description,
                    tag=self.tag,
                    handler=handler,
                    answer=answer,
                    status=status,
                    body=body,
                    body_required=body_required,
                    query=query,
                    example=example,
                    open=open,
                    media_type=media_type,
                    other=other or {},
                )
            )
            return handler

        return add
