"""Finds the operation of a request by method and path."""

from __future__ import annotations

import re
from collections.abc import Sequence

from custody.http.operation import Operation

ANY_TEXT = {"producer_id"}
"""Placeholders that match slashes too: a producer's id may be any text."""


class Routes:
    """Operations by path. The first one that matches counts."""

    def __init__(self, operations: Sequence[Operation]) -> None:
        self._exact = {
            (operation.method, operation.path): operation for operation in operations if "{" not in operation.path
        }
        self._patterns: dict[str, list[tuple[Operation, re.Pattern[str]]]] = {}
        for operation in operations:
            of_segment = self._patterns.setdefault(_first_segment(operation.path), [])
            of_segment.append((operation, _pattern(operation.path)))

    def find(self, method: str, path: str) -> tuple[Operation, dict[str, str]] | None:
        """The operation, and the values of the placeholders in its path."""
        exact = self._exact.get((method, path))
        if exact is not None:
            return exact, {}
        for operation, pattern in self._patterns.get(_first_segment(path), ()):
            if operation.method == method and (found := pattern.fullmatch(path)):
                return operation, found.groupdict()
        return None

    def at(self, path: str) -> list[Operation]:
        """All operations that match a path, whatever their method."""
        of_segment = self._patterns.get(_first_segment(path), ())
        return [operation for operation, pattern in of_segment if pattern.fullmatch(path)]


def _first_segment(path: str) -> str:
    return path[1:].partition("/")[0]


def _pattern(path: str) -> re.Pattern[str]:
    def group(placeholder: re.Match[str]) -> str:
        name = placeholder[1]
        return f"(?P<{name}>{'.+' if name in ANY_TEXT else '[^/]+'})"

    return re.compile(re.sub(r"\\{(\w+)\\}", group, re.escape(path)), re.DOTALL)
