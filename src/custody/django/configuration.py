"""The setting `CUSTODY` of a Django project: a mapping, whose unknown keys are refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from django.conf import settings
from django.db import connections

from custody.connection import url_from
from custody.errors import InvalidConfig, did_you_mean
from custody.model import bounds
from custody.model.policy import Duration, seconds

URLS = ("postgresql://", "postgres://", "http://", "https://")


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """The keys of `CUSTODY`, in capitals. `database` is an alias of DATABASES or a URL; the others are those of
    `custody.connect`."""

    database: str = "default"
    listen_url: str | None = None
    pool_size: int = 10
    statement_timeout: Duration | None = None
    api_key: str | None = field(default=None, repr=False)
    ca: str | Path | None = None
    allow_insecure: bool = False

    @property
    def alias(self) -> str | None:
        """The alias of Custody's database in DATABASES; None if a URL is given."""
        return None if self.database.startswith(URLS) else self.database

    @property
    def url(self) -> str:
        """The URL of the database, or of the server."""
        return self.database if self.alias is None else url_of(self.alias)

    def arguments(self) -> dict[str, Any]:
        """The other keys, as `custody.connect` takes them."""
        given = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "database"}
        return {name: value for name, value in given.items() if value not in (None, False)}


def configuration() -> Configuration:
    """The setting, checked. Raises InvalidConfig."""
    given = getattr(settings, "CUSTODY", {})
    if not isinstance(given, Mapping):
        raise InvalidConfig(f"CUSTODY is {given!r}", 'Give a dict, such as CUSTODY = {"DATABASE": "default"}.')
    known = {one.name.upper(): one.name for one in fields(Configuration)}
    for name in given:
        if name not in known:
            raise InvalidConfig(f"CUSTODY has no setting {name!r}", did_you_mean(str(name), list(known)))
    found = Configuration(**{known[name]: value for name, value in given.items()})
    _require(found)
    return found


def _require(found: Configuration) -> None:
    for name in ("database", "listen_url", "api_key", "ca"):
        value = getattr(found, name)
        if not isinstance(value, (str, Path) if name == "ca" else str) and not (value is None and name != "database"):
            raise InvalidConfig(f"CUSTODY[{name.upper()!r}] is {value!r}", "Give a string.")
    if not isinstance(found.allow_insecure, bool):
        raise InvalidConfig(f"CUSTODY['ALLOW_INSECURE'] is {found.allow_insecure!r}", "Give True or False.")
    bounds.require("pool_size", found.pool_size)
    if found.statement_timeout is not None:
        seconds(found.statement_timeout)
    if found.alias is None:
        return
    if found.alias not in connections:
        raise InvalidConfig(
            f"CUSTODY['DATABASE'] is {found.alias!r}, which is neither an alias of DATABASES nor a URL",
            did_you_mean(found.alias, list(connections)),
        )
    if (vendor := connections[found.alias].vendor) != "postgresql":
        raise InvalidConfig(
            f"DATABASES[{found.alias!r}] is {vendor}, and Custody needs PostgreSQL",
            'Name another one: CUSTODY = {"DATABASE": …}, an alias of a PostgreSQL database or a postgresql:// URL.',
        )


def url_of(alias: str) -> str:
    """The URL of a database of the project: in tests of Django, that of the test database."""
    given = connections[alias].settings_dict
    named = {"dbname": "NAME", "user": "USER", "password": "PASSWORD", "host": "HOST", "port": "PORT"}
    return url_from(given["OPTIONS"] | {keyword: given[name] for keyword, name in named.items() if given[name]})
