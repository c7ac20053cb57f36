"""The stock example as users would write it: two pipelines, and a table that refuses a quantity below zero.

`main` runs in the driver's process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import psycopg

import custody
from custody.spark import Pipeline

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

CHANGES, LEVELS, LEDGER = "stock-changes", "stock-applied", "stock-ledger"
STOCK, BOOKS = "stock", "books"
PER_BATCH = 4000
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
WAREHOUSES = [("0", "Leeds"), ("1", "Turin"), ("2", "Malmö")]


@cache
def _warehouse(url: str) -> psycopg.Connection:
    """One connection for each Python process of an executor."""
    return psycopg.connect(url, autocommit=True)


def applying(url: str) -> Callable[[custody.Message], Any]:
    """An idempotent handler that applies one change of stock and publishes it."""

    def apply(message: custody.Message) -> Any:
        change = message.payload
        if message.attempt <= change.get("fails", 0):
            raise TimeoutError("the inventory service did not answer")
        if change.get("kills"):
            os._exit(1)
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


def pipelines(url: str) -> list[Pipeline]:
    """A handler applies changes one by one and publishes them; a frame books what was published."""
    stock = Pipeline(
        source=CHANGES,
        group=STOCK,
        sink=LEVELS,
        policy=custody.Policy(
            ordering="key",
            max_attempts=3,
            backoff=custody.Exponential("50ms", cap="500ms"),
            visibility_timeout="3m",  # on a slow machine the second driver starts late, and takes the claim over
            on_dead="hold",
        ),
    )
    stock.each(applying(url))
    books = Pipeline(
        source=LEVELS,
        group=BOOKS,
        sink=LEDGER,
        policy=custody.Policy(ordering="key", max_attempts=1),
        schema="sku string, number int, units string",
    )

    @books.frame
    def book(applied: DataFrame) -> DataFrame:
        from pyspark.sql import functions as F

        where = applied.sparkSession.createDataFrame(WAREHOUSES, "area string, warehouse string")
        typed = applied.withColumn("units", F.col("units").cast("int"))
        by_area = typed.withColumn("area", (F.substring_index("sku", "-", -1).cast("int") % 3).cast("string"))
        return by_area.join(F.broadcast(where), "area").drop("area")

    return [stock, books]


def main() -> None:
    from custody.spark.running import run
    from custody.spark.session import session
    from custody.spark.settings import RunSettings

    url = sys.argv[1]
    with session(app_name="custody demo", config={"spark.ui.enabled": "false"}) as spark:
        run(pipelines(url), url, RunSettings(max_per_batch=PER_BATCH), spark=spark)
