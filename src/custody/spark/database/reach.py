"""Whether a database can be reached from where this runs, and by what way."""

from __future__ import annotations

import os

import psycopg
from psycopg.conninfo import conninfo_to_dict


def unreached(url: str, seconds: int = 5) -> str | None:
    """Why this process cannot connect to the database, by a connection that is closed again; None if it can."""
    try:
        psycopg.connect(url, connect_timeout=seconds, application_name="custody-probe").close()
    except psycopg.Error as error:
        return str(error).strip()
    return None


def by_socket(url: str) -> bool:
    """Whether the URL leads to a Unix socket, which only processes of the same machine can use."""
    parts = conninfo_to_dict(url)
    if parts.get("hostaddr") or os.environ.get("PGHOSTADDR"):
        return False
    host = str(parts.get("host") or os.environ.get("PGHOST") or "/")
    return host.startswith(("/", "@"))
