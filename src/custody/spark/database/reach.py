"""Whether this process can reach a database, and whether it does so by a Unix socket."""

from __future__ import annotations

import os

import psycopg
from psycopg.conninfo import conninfo_to_dict


def unreached(url: str, seconds: int = 5) -> str | None:
    """The error with which this process cannot connect to the database; None if it can."""
    try:
        psycopg.connect(url, connect_timeout=seconds, application_name="custody-probe").close()
    except psycopg.Error as error:
        return str(error).strip()
    return None


def by_socket(url: str) -> bool:
    """Whether the URL names a Unix socket, which only processes on the same machine can use."""
    parts = conninfo_to_dict(url)
    if parts.get("hostaddr") or os.environ.get("PGHOSTADDR"):
        return False
    host = str(parts.get("host") or os.environ.get("PGHOST") or "/")
    return host.startswith(("/", "@"))
