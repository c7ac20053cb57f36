"""System checks: the setting, and with `manage.py check --database …` the schema in the database."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.core.checks import CheckMessage, Error, Warning

from custody.connection import connect_existing, planned
from custody.django.configuration import configuration
from custody.errors import CustodyError, SchemaMismatch, SchemaNewer

MIGRATE = "Run `manage.py custody migrate`."


def check_configuration(**_given: Any) -> list[CheckMessage]:
    """`custody.E001`: the setting is not valid."""
    try:
        configuration()
    except CustodyError as error:
        return [Error(error.message, hint=error.remedy or None, id="custody.E001")]
    return []


def check_schema(databases: Sequence[str] | None = None, **_given: Any) -> list[CheckMessage]:
    """`custody.W001`: the schema is missing, older, or does not work with this code; `custody.W002`: the database
    cannot be asked.

    They are warnings, because `manage.py migrate` runs this check before there is a schema.
    """
    try:
        found = configuration()
    except CustodyError:
        return []  # custody.E001
    if found.alias is None or found.alias not in (databases or ()):
        return []
    try:
        opened = connect_existing(found.url)
        if opened is not None:
            opened.close()
        older = _steps(found.url)
    except SchemaMismatch as error:
        hint = MIGRATE if error.code in ("schema_missing", "schema_older") else error.remedy
        return [Warning(f"Database {found.alias!r}: {error.message}", hint=hint, id="custody.W001")]
    except CustodyError as error:
        return [Warning(f"Database {found.alias!r}: {error.message}", hint=error.remedy, id="custody.W002")]
    if not older:
        return []
    message = f"Database {found.alias!r}: the schema is of an older release: what is new is refused"
    return [Warning(message, hint=MIGRATE, id="custody.W001")]


def _steps(url: str) -> bool:
    """Whether a migration would change the schema; not if it is of a newer release that serves this one."""
    try:
        return bool(planned(url))
    except SchemaNewer:
        return False
