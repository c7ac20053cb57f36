"""Enriches orders with a join, as a frame: typed columns in, columns out, and rows that fail are marked.

An order of an unknown product waits for a retry instead of going out without its price.
"""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

import custody
from custody.spark import Pipeline, fail_when

PRODUCTS = [("tea", 4.5), ("cup", 12.0), ("pot", 30.0)]

pipeline = Pipeline(
    source="orders",
    group="enrichment",
    sink="orders-priced",
    policy=custody.Policy(ordering="key", max_attempts=2, backoff=custody.Constant("100ms")),
    schema="customer string, product string, pieces int",
)


@pipeline.frame
def price(orders: DataFrame) -> DataFrame:
    products = orders.sparkSession.createDataFrame(PRODUCTS, "product string, price double")
    priced = orders.join(F.broadcast(products), "product", "left")
    return (
        priced.transform(fail_when(F.col("pieces") <= 0, "an order of nothing", dead=True))
        .transform(fail_when(F.col("price").isNull(), F.concat(F.lit("no price for "), F.col("product"))))
        .withColumn("total", F.round(F.col("price") * F.col("pieces"), 2))
    )


def main() -> None:
    with custody.connect() as c:
        known = {topic.name for topic in c.topics()}
        for name in {"orders", "orders-priced"} - known:
            c.create_topic(name, partitions=2)
        for number in range(200):
            product = "gold" if number == 50 else ("tea", "cup", "pot")[number % 3]
            order = {
                "customer": f"C-{number % 20}",
                "product": product,
                "pieces": 0 if number == 60 else 1 + number % 4,
            }
            c.publish("orders", order, key=order["customer"])
        summary = pipeline.run(c, drain="30s")
        print(f"{summary.done} priced, {summary.dead} dead")
        for letter in c.dead("orders", "enrichment"):
            print(f"  {letter.payload}: {letter.last_error}")


if __name__ == "__main__":
    main()
