"""The API description, generated from the operations: as OpenAPI, and as an HTML page that loads no other resources."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from datetime import datetime
from importlib.metadata import version
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec

from custody.http.examples import example_of
from custody.http.operation import Operation
from custody.model.limits import LARGEST, SMALL
from custody.wire import fields
from custody.wire.answers import ErrorOut

_REF = "#/components/schemas/{name}"
_RETRY = {429, 503}
_WITH_A_BODY = {400, 408, 413, 415}
_OF_OPEN_CALLS = {422, 500, 503}
_ERRORS = {
    400: "The body is not JSON.",
    401: "A key is needed.",
    403: "The key lacks the right to do this, or the call comes from a web page of another origin.",
    404: "There is no such topic, group, partition, producer, transaction or message.",
    408: "The body did not arrive in time.",
    409: "The request conflicts with the current state.",
    413: "The body (after decompression) or the batch is too large.",
    415: "The Content-Encoding is not gzip.",
    422: "A field is not valid; `path` names it.",
    500: "The server failed; its log has the details under the `request_id`.",
    429: "A limit is reached: try again after `Retry-After`.",
    503: "The server is busy or not available: try again after `Retry-After`.",
}
_DESCRIPTION = (
    "A durable message log in which every message has a lifecycle. Bodies are JSON, whatever their Content-Type; "
    "with `Content-Encoding: gzip` they are decompressed first. "
    'Durations are texts such as "30s", or seconds. Every error is `{"error": {"code", "message", "remedy"}}`.'
)
_NUMBERS = {"partition": SMALL, "offset": LARGEST, "delay_id": LARGEST}


def describe(operations: Sequence[Operation]) -> bytes:
    """The document at /openapi.json."""
    types: list[Any] = [ErrorOut]
    for operation in operations:
        types += [kind for kind in (operation.body, operation.query) if kind is not None]
        types += [kind for answer in (operation.answer, *operation.other.values()) for kind in _members(answer)]
    schemas, components = msgspec.json.schema_components(types, schema_hook=fields.schema, ref_template=_REF)
    schema_of = {id(kind): schema for kind, schema in zip(types, schemas, strict=True)}
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _operation(operation, schema_of, components)
    document = {
        "openapi": "3.1.0",
        "info": {
            "title": "Custody",
            "version": version("custody"),
            "description": _DESCRIPTION,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer", "description": "See `custody apikeys`."}},
        },
        "security": [{}, {"key": []}],
    }
    return msgspec.json.encode(document)


def _members(answer: Any) -> tuple[Any, ...]:
    """The types that an answer may have: msgspec does not support unions of structs."""
    if answer is None:
        return ()
    return get_args(answer) if isinstance(answer, UnionType) else (answer,)


def _operation(operation: Operation, schema_of: dict[int, Any], components: dict[str, Any]) -> dict[str, Any]:
    described: dict[str, Any] = {
        "operationId": operation.name,
        "summary": operation.summary,
        "description": operation.description,
        "tags": [operation.tag],
        "parameters": [*_path_parameters(operation), *_query_parameters(operation, components)],
        "responses": _responses(operation, schema_of),
    }
    if operation.body is not None:
        content: dict[str, Any] = {"schema": schema_of[id(operation.body)]}
        if operation.example is not None:
            content["example"] = operation.example
        described["requestBody"] = {
            "required": operation.body_required,
            "content": {"application/json": content},
        }
    if operation.open:
        described["security"] = []
    return described


def _path_parameters(operation: Operation) -> list[dict[str, Any]]:
    found = []
    for name in re.findall(r"{(\w+)}", operation.path):
        schema: dict[str, Any] = {"type": "string", "minLength": 1}
        if name in _NUMBERS:
            schema = {"type": "integer", "minimum": 0, "maximum": _NUMBERS[name]}
        found.append(
            {"name": name, "in": "path", "required": True, "description": fields.PLACES[name], "schema": schema}
        )
    return found


def _query_parameters(operation: Operation, components: dict[str, Any]) -> list[dict[str, Any]]:
    described = components[operation.query.__name__]
    return [
        {
            "name": name,
            "in": "query",
            "required": name in described.get("required", ()),
            "description": schema["description"],
            "schema": {key: value for key, value in schema.items() if key != "description"},
        }
        for name, schema in described["properties"].items()
    ]


def _responses(operation: Operation, schema_of: dict[int, Any]) -> dict[str, Any]:
    responses: dict[str, Any] = {}
    for status, kind in ((operation.status, operation.answer), *operation.other.items()):
        responses[str(status)] = {"description": operation.summary}
        if kind is not None:
            members = _members(kind)
            schemas = [schema_of[id(member)] for member in members]
            schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
            content = {"schema": schema, "example": example_of(operation.name, members[0])}
            responses[str(status)]["content"] = {operation.media_type: content}
    error = {"application/json": {"schema": schema_of[id(ErrorOut)]}}
    for status, text in sorted(_ERRORS.items()):
        if (operation.body is None and status in _WITH_A_BODY) or (operation.open and status not in _OF_OPEN_CALLS):
            continue
        responses[str(status)] = {"description": text, "content": error}
        if status in _RETRY:
            responses[str(status)]["headers"] = {"Retry-After": _RETRY_AFTER}
    return responses


_RETRY_AFTER = {"description": "Seconds to wait.", "required": True, "schema": {"type": "integer", "minimum": 0}}


def page(operations: Sequence[Operation]) -> str:
    """The page at /docs: every call with its fields, and examples of its body and answer."""
    parts = [
        _HEAD,
        f"<p>{html.escape(_DESCRIPTION)} The same for programs: <a href='/openapi.json'>openapi.json</a></p>",
    ]
    for tag in dict.fromkeys(operation.tag for operation in operations):
        parts.append(f"<h2>{html.escape(tag)}</h2>")
        parts += [_article(operation) for operation in operations if operation.tag == tag]
    return "".join([*parts, "</main></html>"])


def _article(operation: Operation) -> str:
    rows = [("path", name, "text or number") for name in re.findall(r"{(\w+)}", operation.path)]
    rows += [("query", field.name, _typed(field)) for field in msgspec.structs.fields(operation.query)]
    if operation.body is not None:
        rows += [("body", field.name, _typed(field)) for field in msgspec.structs.fields(operation.body)]
    listed = "".join(
        f"<tr><td>{where}</td><td><code>{html.escape(name)}</code></td><td>{html.escape(kind)}</td></tr>"
        for where, name, kind in rows
    )
    example = "" if operation.example is None else _shown(operation.example)
    if operation.answer is not None:
        example += f"<p>Answer:</p>{_shown(example_of(operation.name, _members(operation.answer)[0]))}"
    return (
        f"<article id='{operation.name}'><h3><b>{operation.method}</b> <code>{html.escape(operation.path)}</code></h3>"
        f"<p>{html.escape(operation.summary)} {html.escape(operation.description)}</p>"
        f"{f'<table>{listed}</table>' if rows else ''}{example}</article>"
    )


def _shown(example: Any) -> str:
    text = example if isinstance(example, str) else msgspec.json.format(msgspec.json.encode(example)).decode()
    return f"<pre>{html.escape(text)}</pre>"


def _typed(field: msgspec.structs.FieldInfo) -> str:
    return f"{_said(field.type)}, required" if field.required else _said(field.type)


_WORDS: dict[Any, str] = {
    str: "text",
    int: "number",
    float: "number",
    bool: "true or false",
    datetime: "time",
    fields.Duration: "duration",
    fields.Timeout: "duration",
    fields.Size: "size",
    msgspec.Raw: "any JSON value",
    type(None): "null",
}


def _said(kind: Any) -> str:
    """A type in words."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _said(arguments[0])
    if origin is Literal:
        return ", ".join(map(str, arguments))
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(_said(one) for one in arguments if one is not msgspec.UnsetType))
    if origin is list:
        return f"list of {_said(arguments[0])}"
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return "{" + ", ".join(kind.__struct_fields__) + "}"
    return _WORDS.get(kind, "object" if origin is dict else kind.__name__)


_HEAD = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Custody: the HTTP interface</title><style>
body{font:16px/1.5 system-ui,sans-serif;margin:0;color:#1a1a1a;background:#fafafa}
main{max-width:56rem;margin:auto;padding:2rem 1rem}
article{background:#fff;border:1px solid #ddd;border-radius:6px;padding:.5rem 1rem;margin:1rem 0}
h3{margin:.3rem 0}b{color:#0a58ca}code,pre{font-family:ui-monospace,monospace;font-size:.9em}
pre{background:#f3f3f3;padding:.6rem;overflow:auto}td{padding:.1rem .8rem .1rem 0;vertical-align:top}
</style></head><main><h1>Custody: the HTTP interface</h1>"""
