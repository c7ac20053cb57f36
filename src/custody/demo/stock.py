"""The stock example on Spark, as users would write it: two pipelines.

`main` runs in the driver's process.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import custody
from custody.demo.stage import end_with_the_demo
from custody.demo.warehouse import CHANGES, STOCK, applying
from custody.spark import Pipeline

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

LEVELS, LEDGER = "stock-applied", "stock-ledger"
BOOKS = "books"
PER_BATCH = 4000
WAREHOUSES = [("0", "Leeds"), ("1", "Turin"), ("2", "Malmö")]


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
    """Starts Spark, then waits for a line with the URL of the database, and runs the pipelines until the demo ends."""
    from custody.spark.running import run
    from custody.spark.session import session
    from custody.spark.settings import RunSettings

    with session(app_name="custody demo", config={"spark.ui.enabled": "false"}) as spark:
        url = sys.stdin.readline().strip()
        if not url:  # the demo has ended
            return
        end_with_the_demo()
        run(pipelines(url), url, RunSettings(max_per_batch=PER_BATCH), spark=spark)
