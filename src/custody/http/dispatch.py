"""From a request to an answer: calls the operation, and turns every exception into an error answer."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from functools import cache, lru_cache, partial
from types import UnionType
from typing import Annotated, Any, Union, cast, get_args, get_origin
from urllib.parse import parse_qsl

import msgspec

from custody.errors import (
    CustodyError,
    InvalidArgument,
    InvalidJson,
    LeaseLost,
    RequestTimeout,
    Transient,
    UnsupportedEncoding,
)
from custody.http.answer import Answer
from custody.http.asgi import Client, Receive
from custody.http.body import Body
from custody.http.call import Call
from custody.http.operation import Operation
from custody.http.rights import Caller
from custody.http.state import ServerState
from custody.wire import fields
from custody.wire.answers import ErrorBody, ErrorOut
from custody.wire.requests import Shape

logger = logging.getLogger(__name__)

RETRY_AFTER = (b"retry-after", b"1")
MOST_PARAMETERS = 100
"""Most query parameters: more are refused before they are parsed."""


async def answer(
    state: ServerState,
    operation: Operation,
    *,
    params: Mapping[str, str],
    query_string: bytes,
    headers: Mapping[bytes, bytes],
    receive: Receive,
    client: Client,
    caller: Caller,
    worker: str,
    request_id: str,
) -> Answer:
    """Calls the operation and returns its answer, or that of an error. Raises nothing."""
    body = Body(state, headers)
    try:
        given = b"" if operation.body is None else await body.read(receive, whole=client.whole)
        call = Call(
            state,
            caller=caller,
            worker=worker,
            request_id=request_id,
            params=params,
            query=parse_query(operation, query_string),
            read=partial(operation.read, given, state.settings.max_batch),
            size=len(given),
            headers=headers,
            client=client,
        )
        require_names(params)
        if operation.reads:
            async with state.reads:  # as many as there are threads, because what they read is counted only afterwards
                await state.answers.room(state.body_timeout)
                result = await operation.handler(call)
        else:
            result = await operation.handler(call)
    except Exception as error:
        return failed(error, request_id)
    finally:
        body.release()
    if isinstance(result, Answer):
        return result
    return Answer(b"" if result is None else msgspec.json.encode(result), operation.status)


def parse_query(operation: Operation, query_string: bytes) -> Any:
    """The query as the operation's type. Short ones are cached, as polling clients repeat them: do not change it."""
    return (_remembered if len(query_string) <= 200 else _parsed)(operation.query, query_string)


def _parsed(kind: type[Shape], query_string: bytes) -> Shape:
    try:
        pairs = parse_qsl(query_string.decode("latin-1"), keep_blank_values=True, max_num_fields=MOST_PARAMETERS)
    except ValueError as error:
        raise InvalidArgument(f"the query has more than {MOST_PARAMETERS} parameters", "Give fewer.") from error
    lists = _lists(kind)
    given: dict[str, str | list[str]] = {name: [] for name, _ in pairs if name in lists}
    for name, value in pairs:
        if name in lists:
            cast("list[str]", given[name]).extend([value] if value else ())  # an empty list is sent as `name=`
            continue
        if name in given:
            raise InvalidArgument(f"{name!r} is given more than once", "Give it once.", path=f"$.{name}")
        given[name] = value
    return msgspec.convert(given, kind, strict=False, dec_hook=fields.read)


@cache
def _lists(kind: type[Shape]) -> frozenset[str]:
    """The parameters that may be repeated."""
    return frozenset(
        one.encode_name
        for one in msgspec.structs.fields(kind)
        if list in (get_origin(part) for part in _parts(one.type))
    )


def _parts(hint: Any) -> list[Any]:
    """A type, and those that it is a union or an annotation of."""
    if get_origin(hint) in (Annotated, Union, UnionType):
        return [part for one in get_args(hint) for part in _parts(one)]
    return [hint]


_remembered = lru_cache(maxsize=1024)(_parsed)


def require_names(params: Mapping[str, str]) -> None:
    """Refuses a NUL character, which PostgreSQL does not allow in texts."""
    for name, value in params.items():
        if "\0" in value:
            raise InvalidArgument(f"{name} in the path has a NUL character", "Remove it.", path=name)


def failed(error: Exception, request_id: str) -> Answer:
    """The answer for an error."""
    status, extra = 500, []
    body = ErrorBody(code="internal_error", message="the server failed; its log has more", request_id=request_id)
    if isinstance(error, msgspec.ValidationError):
        status = InvalidArgument.status
        message, path = located(str(error))
        body = ErrorBody(code=InvalidArgument.code, message=message, path=path, request_id=request_id)
    elif isinstance(error, msgspec.DecodeError | UnicodeDecodeError | RecursionError):
        status = InvalidJson.status
        body = ErrorBody(code=InvalidJson.code, message=f"the body is not JSON: {error}", request_id=request_id)
    elif isinstance(error, CustodyError):
        status = error.status
        body = ErrorBody(code=error.code, message=error.shown, request_id=request_id)
        if error.remedy:
            body.remedy = error.remedy
        if isinstance(error, InvalidArgument) and error.path is not None:
            body.path = error.path
        if isinstance(error, LeaseLost) and error.lost:
            body.lost = list(error.lost)
        if isinstance(error, Transient):
            extra.append(RETRY_AFTER)
        if isinstance(error, RequestTimeout):  # the rest of the body would be taken for the next request
            extra.append((b"connection", b"close"))
        if isinstance(error, UnsupportedEncoding):
            extra.append((b"accept-encoding", b"gzip"))
        if status == 401:
            extra.append((b"www-authenticate", b'Bearer realm="custody"'))
        if error.shown != error.message or (status >= 500 and not isinstance(error, Transient)):
            _log(error, error.code, request_id)
    else:
        _log(error, body.code, request_id)
    return Answer(msgspec.json.encode(ErrorOut(body)), status, tuple(extra))


def _log(error: Exception, code: str, request_id: str) -> None:
    """Logs the details that the caller does not get, under the request id that it does get."""
    level = logging.WARNING if isinstance(error, Transient | InvalidArgument) else logging.ERROR
    extra = {"custody": {"request_id": request_id, "code": code}}
    logger.log(level, "request %s failed", request_id, exc_info=error, extra=extra)


_FIELD = re.compile(r"Object (?:contains unknown|missing required) field `(.*)`\Z", re.DOTALL)


def located(message: str) -> tuple[str, str]:
    """Splits a message of msgspec into its text and the path of the field."""
    said, _, path = message.rpartition(" - at `") if " - at `" in message else (message, "", "$`")
    path = path.removesuffix("`")
    field = _FIELD.match(said)
    return said, path if field is None else f"{path}.{field[1]}"
