"""Reads the schema of a pipeline without Spark, for tests of handlers: "sku string, tags array<string>"."""

from __future__ import annotations

import re
from typing import Any

from custody.errors import InvalidArgument

_NAMES = {
    "boolean": "boolean", "tinyint": "byte", "byte": "byte", "smallint": "short", "short": "short",
    "int": "integer", "integer": "integer", "bigint": "long", "long": "long", "float": "float", "real": "float",
    "double": "double", "string": "string", "binary": "binary", "date": "date", "timestamp": "timestamp",
    "timestamp_ltz": "timestamp", "timestamp_ntz": "timestamp_ntz", "variant": "variant",
}  # fmt: skip
_DECIMALS = ("decimal", "dec", "numeric")
_TOKEN = re.compile(r"\s*(?:(?P<quoted>`(?:[^`]|``)+`)|(?P<text>'(?:[^'\\]|\\.)*')|(?P<word>\w+)|(?P<sign>[<>(),:]))")


def fields_of(schema: str) -> dict[str, Any]:
    """What Spark's `StructType.fromDDL(schema).jsonValue()` is."""
    reader = _Reader(schema)
    fields = reader.fields(None)
    return {"type": "struct", "fields": fields}


class _Reader:
    """The words and signs of a schema, from left to right."""

    def __init__(self, schema: str) -> None:
        self._schema, self._tokens, at = schema, list[str](), 0
        text = schema.rstrip()
        while at < len(text):
            found = _TOKEN.match(text, at)
            if found is None:
                raise self._refused(text[at:].strip()[:20])
            self._tokens.append(found[0].strip())
            at = found.end()

    def fields(self, end: str | None) -> list[dict[str, Any]]:
        """The fields up to this sign, or to the end."""
        found: list[dict[str, Any]] = []
        while True:
            name = self._take()
            if name.startswith("`"):
                name = name[1:-1].replace("``", "`")
            elif not re.fullmatch(r"\w+", name):
                raise self._refused(name)
            if self._tokens[:1] == [":"]:
                self._take()
            field = {"name": name, "type": self._type(), "nullable": True, "metadata": {}}
            if self._next() == "not":
                self._take()
                self._expect("null")
                field["nullable"] = False
            if self._next() == "comment":
                self._take()
                field["metadata"] = {"comment": self._take()[1:-1]}
            found.append(field)
            if not self._tokens and end is None:
                return found
            sign = self._take()
            if sign == end:
                return found
            if sign != ",":
                raise self._refused(sign)

    def _type(self) -> Any:
        name = self._take().lower()
        if name in _DECIMALS:
            size = ["10", "0"]
            if self._next() == "(":
                self._take()
                size = [self._take(), "0"]
                if self._next() == ",":
                    self._take()
                    size[1] = self._take()
                self._expect(")")
            return f"decimal({','.join(size)})"
        if name in ("char", "varchar", "character"):
            self._expect("(")
            self._take()
            self._expect(")")
            return "string"
        if name not in ("array", "map", "struct"):
            if name not in _NAMES:
                raise self._refused(name)
            return _NAMES[name]
        self._expect("<")
        if name == "struct":
            return {"type": "struct", "fields": self.fields(">")}
        first = self._type()
        if name == "array":
            self._expect(">")
            return {"type": "array", "elementType": first, "containsNull": True}
        self._expect(",")
        second = self._type()
        self._expect(">")
        return {"type": "map", "keyType": first, "valueType": second, "valueContainsNull": True}

    def _next(self) -> str | None:
        return self._tokens[0].lower() if self._tokens else None

    def _take(self) -> str:
        if not self._tokens:
            raise self._refused("its end")
        return self._tokens.pop(0)

    def _expect(self, wanted: str) -> None:
        found = self._take()
        if found.lower() != wanted:
            raise self._refused(found)

    def _refused(self, at: str) -> InvalidArgument:
        return InvalidArgument(
            f"the schema {self._schema!r} cannot be read at {at!r}",
            "Write the fields as in SQL: 'sku string, add int'.",
        )
