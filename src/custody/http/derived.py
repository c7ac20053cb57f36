"""Operations that are made of declared verbs: rights, arguments, the call, the answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from custody.engine import Custody
from custody.http.call import Call
from custody.http.operation import Handler, Operation, described
from custody.verbs.transactions import Transactions
from custody.wire.fields import Range
from custody.wire.verb import Verb, declared

_OF_TRANSACTIONS = {verb.operation: verb for verb in declared(Transactions).values()}
VERBS: Mapping[str, Verb] = {verb.operation: verb for verb in declared(Custody).values()} | _OF_TRANSACTIONS
"""Every declared verb, by the name of its operation."""
ANY: tuple[Any, ...] = ("produce", "consume", "admin")


_HANDLERS: dict[str, Handler] = {}


def by_hand(handler: Handler) -> Handler:
    """Of the verb with the name of this function the handler: for what a declaration cannot say."""
    _HANDLERS[VERBS[handler.__name__].operation] = handler
    return handler


def operations() -> list[Operation]:
    """Those of all declared verbs, after the modules with handlers by hand were imported."""
    return [_operation(verb, _HANDLERS.get(verb.operation) or _handler(verb)) for verb in VERBS.values()]


def _operation(verb: Verb, handler: Handler) -> Operation:
    summary, description = described(verb.function)
    return Operation(
        method=verb.method,
        path=verb.path,
        name=verb.operation,
        summary=summary,
        description=description,
        tag=verb.tag,
        handler=handler,
        answer=verb.answer,
        status=verb.status,
        body=verb.body,
        body_required=verb.body_required,
        query=verb.query,
        example=verb.example,
        open=False,
    )


def _handler(verb: Verb) -> Handler:
    async def handler(call: Call) -> object:
        allow(verb, call)
        given = arguments(verb, call)
        run = {"slow": call.run, "quick": call.state.quick, "read": call.state.read}[verb.thread]
        verbs = call.engine.transactions if verb.operation in _OF_TRANSACTIONS else call.engine
        return verb.answered(await run(getattr(verbs, verb.name), **given), given)

    return handler


def allow(verb: Verb, call: Call) -> None:
    """Refuses a caller without the right: by the path alone, before the body is looked at."""
    topics = [call.topic] if "topic" in call.params else []
    if verb.right == "any":
        if not any(call.caller.may(right, call.topic) for right in ANY):
            call.allow("consume", *topics)
    elif verb.everywhere:
        call.allow_everywhere(verb.right)
    else:
        call.allow(verb.right, *topics)


def arguments(verb: Verb, call: Call) -> dict[str, Any]:
    """What a request gives the verb, by the names of its parameters."""
    found: dict[str, Any] = {}
    for name, placeholder in verb.in_path.items():
        kinds = getattr(verb.hints[name], "__metadata__", ())
        if Range.PARTITION in kinds:
            found[name] = call.partition()
        elif Range.OFFSET in kinds:
            found[name] = call.number(placeholder)
        else:
            found[name] = call.params[placeholder]
    rest = call.query if verb.body is None else (call.body or verb.body())
    for name in rest.__struct_fields__:
        found[name] = value = getattr(rest, name)
        if isinstance(value, list):
            call.require_batch(len(value))
    return found
