"""Writes the orders of a topic into an Iceberg table, each exactly once, with a catalogue in Custody's database.

An order that is no order dies alone, and anybody who knows Iceberg reads the rest: here PyIceberg.
"""

from __future__ import annotations

from pathlib import Path

from pyspark.sql import DataFrame

import custody
from custody.spark import Iceberg, Pipeline

table = Iceberg("shop.orders", warehouse="warehouse")
pipeline = Pipeline(
    source="orders",
    group="lake",
    sink=table,
    policy=custody.Policy(ordering="key", max_attempts=1),
    schema="customer string, product string, pieces int, paid decimal(10,2)",
)


@pipeline.frame
def as_they_are(orders: DataFrame) -> DataFrame:
    return orders.drop("_kind", "_payload", "_headers", "_attempt", "_published_at")


def main() -> None:
    Path("warehouse").mkdir(exist_ok=True)
    with custody.connect() as c:
        if "orders" not in {topic.name for topic in c.topics()}:
            c.create_topic("orders", partitions=2)
        for number in range(100):
            order = {"customer": f"C-{number % 20}", "product": "tea", "pieces": 1 + number % 4, "paid": number / 4}
            c.publish("orders", {**order, "pieces": "many"} if number == 50 else order, key=order["customer"])
        summary = pipeline.run(c, drain="30s")
        print(f"{summary.done} written, {summary.dead} dead")
        with table.catalog(c.database_url) as catalog:
            rows = catalog.load_table("shop.orders").scan(selected_fields=("customer", "paid")).to_arrow()
        print(f"{rows.num_rows} rows of {len(set(rows['customer'].to_pylist()))} customers")


if __name__ == "__main__":
    main()
