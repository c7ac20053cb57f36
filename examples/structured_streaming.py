"""A plain Structured Streaming query over a topic: aggregations need no lifecycle, only the log and its offsets."""

from __future__ import annotations

import tempfile

from pyspark.sql import functions as F

import custody
from custody.spark.session import session


def main() -> None:
    spark = session()
    with custody.connect() as c, tempfile.TemporaryDirectory() as checkpoint:
        if "page-views" not in {topic.name for topic in c.topics()}:
            c.create_topic("page-views", partitions=2)
        for number in range(300):
            c.publish("page-views", {"page": f"/{number % 3}", "ms": number % 50}, key=f"user-{number % 10}")
        views = spark.readStream.format("custody").option("url", c.database_url).option("topic", "page-views").load()
        fields = F.from_json(F.col("payload").cast("string"), "page string, ms int")
        by_page = (
            views.select(fields.alias("view"))
            .groupBy("view.page")
            .agg(F.count("*").alias("views"), F.avg("view.ms").alias("ms"))
        )
        query = (
            by_page.writeStream.format("memory")
            .queryName("by_page")
            .outputMode("complete")
            .option("checkpointLocation", checkpoint)
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        for row in spark.table("by_page").orderBy("page").collect():
            print(f"{row['page']}: {row['views']} views, {row['ms']:.1f} ms")


if __name__ == "__main__":
    main()
