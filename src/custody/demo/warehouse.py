"""The table downstream, which refuses a quantity below zero, and the handler that applies a change of stock to it."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from typing import Any

import psycopg

import custody

CHANGES, STOCK = "stock-changes", "stock"
SCHEMA = """
CREATE TABLE demo_stock (sku text PRIMARY KEY, quantity int NOT NULL CHECK (quantity >= 0));
CREATE TABLE demo_applied (
    entry bigint GENERATED ALWAYS AS IDENTITY, sku text NOT NULL, number int NOT NULL,
    PRIMARY KEY (sku, number));
CREATE TABLE demo_rejected (sku text NOT NULL, number int NOT NULL, error text NOT NULL);
"""
# Each is one statement, so the change is recorded and applied together, and a repetition does nothing.
ADD = """
WITH fresh AS (
    INSERT INTO demo_applied (sku, number) VALUES (%(sku)s, %(number)s) ON CONFLICT DO NOTHING RETURNING sku)
INSERT INTO demo_stock SELECT sku, %(by)s FROM fresh
ON CONFLICT (sku) DO UPDATE SET quantity = demo_stock.quantity + %(by)s
"""
REMOVE = """
WITH fresh AS (
    INSERT INTO demo_applied (sku, number) VALUES (%(sku)s, %(number)s) ON CONFLICT DO NOTHING RETURNING sku)
UPDATE demo_stock s SET quantity = quantity + %(by)s FROM fresh WHERE s.sku = fresh.sku
"""
OVERTAKEN = """
SELECT count(*) FROM (
    SELECT number, lag(number, 1, -1) OVER (PARTITION BY sku ORDER BY entry) AS before FROM demo_applied) x
WHERE number <> before + 1
"""


@cache
def _warehouse(url: str) -> psycopg.Connection:
    """One connection for each process."""
    return psycopg.connect(url, autocommit=True)


def applying(url: str, *, fixed: bool = False) -> Callable[[custody.Message], Any]:
    """An idempotent handler that applies one change of stock and returns it. The fixed one reads "-1 unit" as well."""

    def apply(message: custody.Message) -> Any:
        change = dict(message.payload)
        if message.attempt <= change.get("fails", 0):
            raise TimeoutError("the inventory service did not answer")
        if change.get("kills"):
            os._exit(1)
        if fixed and isinstance(change["by"], str):
            change["by"] = int(change["by"].removesuffix(" unit"))
        if not isinstance(change["by"], int):
            raise ValueError(f"{change['by']!r} is not a number of units")
        connection = _warehouse(url)
        try:
            connection.execute(ADD if change["by"] >= 0 else REMOVE, change)
        except psycopg.errors.CheckViolation as error:
            connection.execute(
                "INSERT INTO demo_rejected VALUES (%s, %s, %s)", [change["sku"], change["number"], str(error)]
            )
            raise
        return {"sku": change["sku"], "number": change["number"], "units": change.get("units", str(change["by"]))}

    return apply
