"""A downstream as users have it: a table that refuses a quantity below zero, and a handler that is sometimes let down.

Run as a module it is one worker process: `python -m custody.demo.stock URL`.
"""

from __future__ import annotations

import sys
import threading

import psycopg
from psycopg_pool import ConnectionPool

import custody

TOPIC, GROUP = "stock-changes", "stock"
SCHEMA = """
CREATE TABLE demo_stock (sku text PRIMARY KEY, quantity int NOT NULL CHECK (quantity >= 0));
CREATE TABLE demo_applied (
    entry bigint GENERATED ALWAYS AS IDENTITY, sku text NOT NULL, number int NOT NULL,
    PRIMARY KEY (sku, number));
CREATE TABLE demo_rejected (sku text NOT NULL, number int NOT NULL, error text NOT NULL);
"""
ADD = """
INSERT INTO demo_stock VALUES (%(sku)s, %(by)s)
ON CONFLICT (sku) DO UPDATE SET quantity = demo_stock.quantity + %(by)s
"""
REMOVE = "UPDATE demo_stock SET quantity = quantity + %(by)s WHERE sku = %(sku)s"
POLICY = custody.Policy(
    ordering="key",
    max_attempts=4,
    backoff=custody.Exponential("50ms", cap="500ms"),
    visibility_timeout="2s",
    on_dead="hold",
)


def handle(pool: ConnectionPool[psycopg.Connection], message: custody.Message) -> None:
    """Applies one change of stock, once, whatever is delivered twice."""
    change = message.payload
    if message.attempt <= change.get("fails", 0):
        raise TimeoutError("the inventory service did not answer")
    if not isinstance(change["by"], int):
        raise ValueError(f"{change['by']!r} is not a number of units")
    with pool.connection() as connection:
        try:
            fresh = connection.execute(
                "INSERT INTO demo_applied (sku, number) VALUES (%s, %s) ON CONFLICT DO NOTHING",
                [change["sku"], change["number"]],
            )
            if fresh.rowcount:
                connection.execute(ADD if change["by"] >= 0 else REMOVE, change)
        except psycopg.errors.CheckViolation as error:
            connection.rollback()
            connection.execute(
                "INSERT INTO demo_rejected VALUES (%s, %s, %s)", [change["sku"], change["number"], str(error)]
            )
            connection.commit()
            raise
    threading.Event().wait(0.001)  # what a call to another service costs


def main() -> None:
    url = sys.argv[1]
    with custody.connect(url) as c, ConnectionPool(url, min_size=1, max_size=4) as pool:
        c.work(TOPIC, GROUP, lambda message: handle(pool, message), concurrency=4, max_messages=40)


if __name__ == "__main__":
    main()
