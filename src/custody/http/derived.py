"""Makes HTTP operations of declared verbs: checks rights, reads arguments, calls the verb, renders the answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from msgspec import UNSET

from custody.engine import Custody
from custody.errors import InvalidArgument
from custody.http.call import Call
from custody.http.operation import Handler, Operation, described
from custody.verbs.transactions import Transactions
from custody.wire.fields import Range, Sent
from custody.wire.verb import Verb, declared, sent_as

_OF_TRANSACTIONS = {verb.operation: verb for verb in declared(Transactions).values()}
VERBS: Mapping[str, Verb] = {verb.operation: verb for verb in declared(Custody).values()} | _OF_TRANSACTIONS
"""Every declared verb, by the name of its operation."""
ANY: tuple[Any, ...] = ("produce", "consume", "admin")


Step = Callable[[Call, dict[str, Any]], Awaitable[object]]
"""The part of a handler between the check of rights and the answer. It takes the verb's arguments and returns the
verb's result."""


def operations(steps: Mapping[str, Step]) -> list[Operation]:
    """The operations of all declared verbs. A step `by_hand` does what a declaration cannot express."""
    return [_operation(verb, _handler(verb, steps.get(name) or _step(verb))) for name, verb in VERBS.items()]


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


def _handler(verb: Verb, step: Step) -> Handler:
    async def handler(call: Call) -> object:
        _allow(verb, call)
        given = _arguments(verb, call)
        if verb.on is not None:
            _allow_on(verb, call, given[verb.on])
        return verb.answered(await step(call, given), given)

    return handler


def _step(verb: Verb) -> Step:
    async def step(call: Call, given: dict[str, Any]) -> object:
        state = call.state
        run = {"slow": state.run, "quick": state.quick, "read": state.read, "append": state.append}[verb.thread]
        verbs = call.engine.transactions if verb.operation in _OF_TRANSACTIONS else call.engine
        return await run(getattr(verbs, verb.name), **given)

    return step


def _allow(verb: Verb, call: Call) -> None:
    """Refuses a caller without the right. Needs only the path, so the body is not read before."""
    topics = [call.topic] if "topic" in call.params else []
    if verb.right == "any":
        if topics and not any(call.caller.may(right, call.topic) for right in ANY):
            call.allow("consume", *topics)
    elif verb.everywhere:
        call.allow_everywhere(verb.right)
    else:
        call.allow(verb.right, *topics)


def _allow_on(verb: Verb, call: Call, topic: str | None) -> None:
    """Refuses a caller without the right on the topic in the request; without one, on all topics."""
    assert verb.right != "any"
    if topic is None:
        call.allow_everywhere(verb.right)
    else:
        call.allow(verb.right, topic)


def _arguments(verb: Verb, call: Call) -> dict[str, Any]:
    """The arguments of the verb in a request, by parameter name."""
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
        other = sent_as(verb.hints[name])
        if other is not None and value is not None and value is not UNSET:
            found[name] = _value(verb.names.get(name, name), other, value)
    return found


def _value(name: str, other: Sent, sent: Any) -> Any:
    try:
        return other.value(sent)
    except InvalidArgument as error:
        raise type(error)(error.message, error.remedy, path=f"$.{name}{error.path or ''}") from error
