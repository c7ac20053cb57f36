"""Stock, in order, on Spark: a REMOVE never overtakes the ADD before it, however often that one fails.

Running totals are only right if nothing of a SKU is lost, doubled or overtaken: the totals downstream show it.
"""

from __future__ import annotations

import custody
from custody.spark import Pipeline

pipeline = Pipeline(
    source="stock-changes",
    group="stock-totals",
    sink="stock-checked",
    policy=custody.Policy(ordering="key", max_attempts=5, backoff=custody.Constant("50ms"), on_dead="hold"),
    schema="sku string, by int",
)


@pipeline.each
def check(message: custody.Message) -> dict[str, object]:
    if message.payload["by"] > 0 and message.attempt <= 2:
        raise TimeoutError("the inventory service did not answer")
    return {**message.payload, "attempts": message.attempt}


def main() -> None:
    with custody.connect() as c:
        known = {topic.name for topic in c.topics()}
        for name in {"stock-changes", "stock-checked"} - known:
            c.create_topic(name, partitions=2)
        seen = c.topic("stock-checked").tails
        skus = [f"SKU-{number}" for number in range(20)]
        for by in (100, -50, -30, -20):
            c.publish_many("stock-changes", [custody.Outgoing({"sku": sku, "by": by}, key=sku) for sku in skus])
        summary = pipeline.run(c, drain="30s")
        stock = dict.fromkeys(skus, 0)
        for partition, offset in enumerate(seen):
            for message in c.read("stock-checked", partition, offset=offset, max_messages=1000):
                stock[message.payload["sku"]] += message.payload["by"]
                if stock[message.payload["sku"]] < 0:
                    raise SystemExit(f"{message.payload['sku']} went below zero")
        left = sum(quantity != 0 for quantity in stock.values())
        print(f"{summary.done} changes in order, {summary.failed} failures on the way, {left} SKUs not at zero")


if __name__ == "__main__":
    main()
