"""A little of everything that Spark does in tests, so that its classes are loaded: see tests/jvm.py."""

from __future__ import annotations

import sys

from pyspark.sql import functions as F
from tests.spark.local import end_jvm

from custody.spark.session import session


def main(directory: str) -> None:
    spark = session(master="local[2,4]", config={"spark.sql.shuffle.partitions": "2", "spark.ui.enabled": "false"})
    frame = spark.range(20, numPartitions=2).mapInArrow(lambda batches: batches, "id long")
    frame.groupBy(F.col("id") % 3).agg(F.collect_list("id").alias("ids")).write.parquet(f"{directory}/rows")
    spark.read.parquet(f"{directory}/rows").join(frame, F.expr("array_contains(ids, id)")).collect()
    stream = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 3).load()
    query = stream.writeStream.foreachBatch(lambda rows, _: rows.persist().unpersist()).trigger(availableNow=True)
    query.option("checkpointLocation", f"{directory}/checkpoint").start().awaitTermination()
    spark.stop()
    end_jvm()


if __name__ == "__main__":
    main(sys.argv[1])
