"""ADD 100 fails at first, REMOVE 50 follows, and the stock must never go below zero.

With a retry topic the REMOVE overtakes the ADD and the table rejects it. Here the failed ADD holds back its own SKU
and no other: run it and watch the order in which things happen.
"""

from __future__ import annotations

import sys
import threading

import psycopg

import custody

SCHEMA = "CREATE TABLE stock (sku text PRIMARY KEY, quantity int NOT NULL CHECK (quantity >= 0))"
CHANGE = "UPDATE stock SET quantity = quantity + %(by)s WHERE sku = %(sku)s"
POLICY = custody.Policy(ordering="key", backoff=custody.Constant("300ms"), on_dead="hold")


def say(line: str) -> None:
    """Write the line and its end at once. `print` writes them apart, and handlers run in several threads."""
    sys.stdout.write(line + "\n")


def main() -> None:
    with custody.connect() as c, psycopg.connect(c.database_url, autocommit=True) as warehouse:
        warehouse.execute("DROP TABLE IF EXISTS stock")
        warehouse.execute(SCHEMA)
        warehouse.execute("INSERT INTO stock VALUES ('SKU-123', 0), ('SKU-456', 0)")
        if "changes" in {topic.name for topic in c.topics()}:
            c.delete_topic("changes")
        c.create_topic("changes")
        c.create_group("changes", "stock", POLICY)
        c.publish("changes", {"sku": "SKU-123", "by": 100}, key="SKU-123")
        c.publish("changes", {"sku": "SKU-123", "by": -50}, key="SKU-123")
        c.publish("changes", {"sku": "SKU-456", "by": 10}, key="SKU-456")

        def apply(message: custody.Message) -> None:
            if message.payload["by"] == 100 and message.attempt == 1:
                say("  ADD 100 to SKU-123: the inventory service timed out")
                raise TimeoutError("no answer from the inventory service")
            warehouse.execute(CHANGE, message.payload)
            say(f"  {message.payload['by']:+} to {message.payload['sku']} (attempt {message.attempt})")

        worker = c.worker_for("changes", "stock", apply)
        thread = threading.Thread(target=worker.run)
        thread.start()
        while (stats := c.stats("changes", "stock")).depth and not stats.dead:
            thread.join(0.05)
        worker.stop()
        thread.join()
        print(dict(warehouse.execute("SELECT sku, quantity FROM stock ORDER BY sku").fetchall()))


if __name__ == "__main__":
    main()
