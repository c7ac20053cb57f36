"""What a role of the database needs to call an SQL function: read from the text of the functions, views and tables.

Functions run with the rights of the caller. So whoever calls one needs EXECUTE on it and on the functions that it
calls, and on each table the rights of its statements. A function marked SECURITY DEFINER runs with the rights of the
owner of the schema, and needs EXECUTE only: those create and drop tables, which nobody but the owner may do, or write,
place and remove what tasks of pipelines stage in the log, and nothing that is published.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Self

from custody.store.functions import OUTBOX, SCHEMA, functions, script_of

FAMILIES = {"log_": "log"}
"""Tables with a number in their name, and the table whose grants they have (see `grant_as` in base/guards.sql)."""
OF_SEGMENTS = {"append_": "make_append", "slices_": "make_reads", "keys_": "make_reads"}
"""Functions with the number of a segment in their name, and the one that makes them. Everybody may execute them: what
counts are the rights on the table."""

_COMMENT = re.compile(r"--[^\n]*")
_STATEMENT = re.compile(
    r"^CREATE (?:OR REPLACE )?(?:UNLOGGED )?(FUNCTION|VIEW|TABLE|SEQUENCE|TRIGGER|TYPE|INDEX|UNIQUE INDEX) "
    r"(?:custody\.)?(\w+)",
    re.MULTILINE,
)
_NAME = r"(?:ONLY\s+)?custody\.(\w+)"
_WRITES = {
    "INSERT": re.compile(rf"\bINSERT\s+INTO\s+{_NAME}"),
    "UPDATE": re.compile(rf"\bUPDATE\s+{_NAME}"),
    "DELETE": re.compile(rf"\bDELETE\s+FROM\s+{_NAME}"),
}
_READ = re.compile(rf"(?:\b(?:FROM|JOIN|USING)\s+|,\s*){_NAME}(?!\w*\s*\()")
_CALL = re.compile(r"\bcustody\.(\w+)(?:%\w*(?:\$s)?)?\s*\(")
_FAMILY_CALL = re.compile(r"\bcustody\.(append_|slices_|keys_)%")
_SEQUENCE = re.compile(r"\bnextval\('custody\.(\w+)'\)")
_LOCKS = re.compile(r"\bFOR\s+(?:NO\s+KEY\s+)?UPDATE\b|\bFOR\s+(?:KEY\s+)?SHARE\b")
_TRIGGER = re.compile(r"\bON\s+custody\.(\w+)\b.*?EXECUTE\s+FUNCTION\s+custody\.(\w+)", re.DOTALL)


@dataclass
class Rights:
    """Functions, and the privileges on tables, views and sequences."""

    functions: set[str] = field(default_factory=set)
    relations: dict[str, set[str]] = field(default_factory=dict)

    def add(self, relation: str, *privileges: str) -> None:
        self.relations.setdefault(relation, set()).update(privileges)

    def merge(self, other: Rights) -> Self:
        self.functions |= other.functions
        for relation, privileges in other.relations.items():
            self.add(relation, *privileges)
        return self

    @property
    def reads_only(self) -> bool:
        return all(privileges <= {"SELECT"} for privileges in self.relations.values())


@dataclass(frozen=True, kw_only=True)
class Catalog:
    """The objects of the schema by name: the text of functions and views, and what writing to a table sets off."""

    texts: Mapping[str, str]
    views: frozenset[str]
    tables: frozenset[str]  # and sequences
    triggers: Mapping[str, frozenset[str]]
    sequences: Mapping[str, frozenset[str]]
    definers: frozenset[str]

    def needed(self, names: Iterable[str]) -> Rights:
        """All that whoever uses these functions and views needs."""
        found = Rights()
        seen: set[str] = set()
        pending = list(names)
        while pending:
            name = pending.pop()
            if name in seen:
                continue
            seen.add(name)
            if name in self.views:
                found.add(name, "SELECT")
            elif name not in OF_SEGMENTS:
                found.functions.add(name)
            if name in self.definers:
                continue
            if name in self.views:  # the owner of a view reads what it is made of; the caller calls its functions
                pending += self._calls_of_view(name)
                continue
            direct = self._direct(self.texts[name])
            pending += direct.functions
            found.merge(Rights(relations=direct.relations))
        return found

    def _calls(self, text: str) -> list[str]:
        names = (*_CALL.findall(text), *_FAMILY_CALL.findall(text))
        return [name for name in names if name in self.texts and name not in self.views]

    def _calls_of_view(self, name: str) -> list[str]:
        inner = self.views.intersection(self._named(_READ, self.texts[name]))
        return [*self._calls(self.texts[name]), *(call for view in inner for call in self._calls_of_view(view))]

    def _direct(self, text: str) -> Rights:
        found = Rights(functions=set(self._calls(text)))
        for statement in text.split(";"):
            for privilege, pattern in _WRITES.items():
                for table in self._named(pattern, statement):
                    found.add(table, privilege, *([] if privilege == "INSERT" else ["SELECT"]))
                    found.functions |= self.triggers.get(table, frozenset())
            for insert in re.split(r"(?=\bINSERT\s+INTO\b)", statement)[1:]:
                for table in self._named(_WRITES["INSERT"], insert):
                    for sequence in self.sequences.get(table, ()):
                        found.add(sequence, "USAGE")
                    if "RETURNING" in insert or "ON CONFLICT" in insert:
                        found.add(table, "SELECT")
                    if "DO UPDATE" in insert:
                        found.add(table, "UPDATE")
            for relation in self._named(_READ, statement):
                if relation in self.views:
                    found.functions.add(relation)
                else:
                    found.add(relation, "SELECT", *(["UPDATE"] if _LOCKS.search(statement) else []))
            for sequence in _SEQUENCE.findall(statement):
                found.add(sequence, "USAGE")
        return found

    def _named(self, pattern: re.Pattern[str], text: str) -> Iterable[str]:
        for name in pattern.findall(text):
            relation = FAMILIES.get(name, name)
            if relation in self.tables or relation in self.views:
                yield relation


@cache
def catalog() -> Catalog:
    """The catalog of this release."""
    script = _COMMENT.sub("", f"{script_of(*(f'schema/{name}' for name in (OUTBOX, *SCHEMA)))}\n{functions()[0]}")
    starts = list(_STATEMENT.finditer(script))
    ends = [*(one.start() for one in starts[1:]), len(script)]
    texts: dict[str, str] = {}
    kinds: dict[str, set[str]] = {}
    triggers: dict[str, set[str]] = {}
    sequences: dict[str, set[str]] = {}
    for found, end in zip(starts, ends, strict=True):
        kind, name, text = found[1], found[2], script[found.end() : end]
        kinds.setdefault(kind, set()).add(name)
        if kind in ("FUNCTION", "VIEW"):
            texts[name] = texts.get(name, "") + text  # with the forms that earlier releases call
        elif kind == "TABLE":
            sequences[name] = set(_SEQUENCE.findall(text))
        elif kind == "TRIGGER" and (on := _TRIGGER.search(text)):
            triggers.setdefault(on[1], set()).update({on[2], *_CALL.findall(text)} & kinds["FUNCTION"])
    texts |= {family: texts[maker] for family, maker in OF_SEGMENTS.items()}
    return Catalog(
        texts=texts,
        views=frozenset(kinds["VIEW"]),
        tables=frozenset(kinds["TABLE"] | kinds["SEQUENCE"]),
        triggers={table: frozenset(names) for table, names in triggers.items()},
        sequences={table: frozenset(names) for table, names in sequences.items()},
        definers=frozenset(name for name in kinds["FUNCTION"] if "SECURITY DEFINER" in texts[name].split("AS $")[0]),
    )
