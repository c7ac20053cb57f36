"""Writes what the code of this release calls into src/custody/store/sql/interfaces: once, when the release is made."""

from __future__ import annotations

from importlib import resources

import psycopg

from custody.store.functions import RELEASE
from custody.store.interfaces import described
from custody.store.roles import entries
from custody.testing import server


def main() -> None:
    with server() as running, running.database() as url, psycopg.connect(url) as connection:
        text = described(connection, entries())
    path = resources.files("custody.store").joinpath("sql", "interfaces", f"{RELEASE}.json")
    with resources.as_file(path) as file:
        file.write_text(text, encoding="utf-8")
        print(f"wrote {file}")


if __name__ == "__main__":
    main()
