"""The stock example: ADD 100 fails at first, REMOVE 50 follows, and the stock must never go below zero.

With retry topics the REMOVE overtakes the ADD and the table's CHECK rejects it. Here a failed change holds back its own
SKU and no other. Four workers share one partition; one of them dies in the middle with messages in its hands.
"""

from __future__ import annotations

import random
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import psycopg

import custody

SKUS = 200
CHANGES = 10  # for each SKU: ADD 100, then REMOVE 10 until little is left
POISON = 5
SCHEMA = """
CREATE TABLE stock (sku text PRIMARY KEY, quantity int NOT NULL CHECK (quantity >= 0));
CREATE TABLE applied (sku text NOT NULL, change int NOT NULL, PRIMARY KEY (sku, change));
"""

ADD = "INSERT INTO stock VALUES (%(sku)s, %(by)s) ON CONFLICT (sku) DO UPDATE SET quantity = stock.quantity + %(by)s"
REMOVE = "UPDATE stock SET quantity = quantity + %(by)s WHERE sku = %(sku)s"


class TimeOut(Exception):
    """The service behind the stock did not answer."""


def apply(connection: psycopg.Connection, message: custody.Message, flaky: random.Random) -> None:
    """Adds or removes stock, once for each change, whatever is delivered twice."""
    if flaky.random() < 0.1:
        raise TimeOut("the inventory service timed out")
    change = message.payload
    with connection.transaction():
        fresh = connection.execute(
            "INSERT INTO applied VALUES (%s, %s) ON CONFLICT DO NOTHING", [change["sku"], change["number"]]
        )
        if fresh.rowcount:
            connection.execute(ADD if change["by"] >= 0 else REMOVE, change)


def work(c: custody.Custody, number: int, outcomes: Counter[str], stop: threading.Event, crash: bool) -> None:
    """Claims, applies, settles, until it is told to stop."""
    flaky = random.Random(number)
    with psycopg.connect(c.database_url, autocommit=True) as connection:
        while not stop.is_set():
            lease = c.claim("changes", "stock", max_messages=20)
            if not lease:
                stop.wait(0.02)  # nothing due: backoff, or another worker has it
                continue
            if crash and outcomes["done"] > 300:
                outcomes["crashed with"] += len(lease)
                return  # never settled: the lease expires, and another worker gets the messages
            stopped: set[str | None] = set()
            for message in lease:
                if message.key in stopped:
                    continue  # released with the message that failed before it
                try:
                    apply(connection, message, flaky)
                    lease.ack(message)
                    outcomes["done"] += 1
                except custody.LeaseLost:
                    outcomes["late settle refused"] += 1
                except psycopg.errors.CheckViolation:
                    outcomes["rejected by CHECK"] += 1
                    lease.nack(message, error="quantity below zero")
                    stopped.add(message.key)
                except (TimeOut, ValueError, TypeError) as error:
                    lease.nack(message, error=f"{type(error).__name__}: {error}")
                    outcomes["failed"] += 1
                    stopped.add(message.key)


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="custody-demo-") as home, custody.connect(home=Path(home)) as c:
        print("embedded PostgreSQL is up; publishing …")
        with psycopg.connect(c.database_url, autocommit=True) as connection:
            connection.execute(SCHEMA)
        c.create_topic("changes", partitions=1)
        policy = custody.Policy(
            ordering="key",
            max_attempts=8,
            backoff=custody.Exponential("20ms", cap="200ms"),
            visibility_timeout="2s",
            on_dead="hold",
        )
        c.create_group("changes", "stock", policy)
        changes = [
            custody.Outgoing(
                {"sku": f"SKU-{sku}", "number": number, "by": 100 if number == 0 else -10}, key=f"SKU-{sku}"
            )
            for number in range(CHANGES)
            for sku in range(SKUS)
        ]
        poison = [
            custody.Outgoing({"sku": f"BAD-{n}", "number": 0, "by": "many"}, key=f"BAD-{n}") for n in range(POISON)
        ] + [custody.Outgoing({"sku": f"BAD-{n}", "number": 1, "by": -10}, key=f"BAD-{n}") for n in range(POISON)]
        published = len(c.publish_many("changes", changes + poison))
        print(f"{published} changes of {SKUS} SKUs, {POISON} of them poison; four workers, one of which will die …")

        outcomes: Counter[str] = Counter()
        started = time.monotonic()
        stop = threading.Event()
        workers = [threading.Thread(target=work, args=(c, number, outcomes, stop, number == 0)) for number in range(4)]
        for worker in workers:
            worker.start()
        waiting_behind_poison = POISON * 2  # each poison message, held for the operator, and the change behind it
        while True:
            stats = c.stats("changes", "stock")
            done = published - stats.depth
            print(f"  resolved {done:5}  in flight {stats.in_flight:3}  parked {stats.parked:4}  dead {stats.dead}")
            finished = stats.depth == waiting_behind_poison and stats.dead == POISON
            if finished or time.monotonic() - started > 60:
                break
            time.sleep(0.5)
        stop.set()
        for worker in workers:
            worker.join()

        with psycopg.connect(c.database_url, autocommit=True) as connection:
            wrong = connection.execute(
                "SELECT count(*) FROM stock WHERE sku LIKE 'SKU-%%' AND quantity <> %s", [100 - 10 * (CHANGES - 1)]
            ).fetchone()
            skus = connection.execute("SELECT count(*) FROM stock WHERE sku LIKE 'SKU-%'").fetchone()
        print(f"\n{dict(outcomes)} in {time.monotonic() - started:.1f} s")
        for blocked in c.blocked_keys("changes", "stock"):
            print(f"  {blocked.key}: {blocked.why}, {blocked.parked} behind it: {blocked.last_error}")
        good = finished and wrong == (0,) and skus == (SKUS,) and not outcomes["rejected by CHECK"]
        right = "every SKU has the right stock, and no write was ever rejected"
        print("verdict:", right if good else f"WRONG: {wrong} of {skus} SKUs, {outcomes['rejected by CHECK']} rejected")
        return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
