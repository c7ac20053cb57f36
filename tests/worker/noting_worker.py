"""A worker that notes when it begins each message, in a table beside Custody. Arguments: database URL, concurrency, and
how many messages to claim at once."""

from __future__ import annotations

import sys
import threading

import psycopg

import custody
from custody.elapsed import elapsed


def main(url: str, concurrency: str, most: str) -> None:
    own = threading.local()

    def handle(message: custody.Message) -> None:
        at = elapsed()
        if not hasattr(own, "db"):
            own.db = psycopg.connect(url, autocommit=True)
        own.db.execute('INSERT INTO begun (at, key, "offset") VALUES (%s, %s, %s)', (at, message.key, message.offset))
        threading.Event().wait(0.02)

    with custody.connect(url, worker="noting") as c:
        c.work("t", "g", handle, concurrency=int(concurrency), max_messages=int(most))


if __name__ == "__main__":
    main(*sys.argv[1:])
