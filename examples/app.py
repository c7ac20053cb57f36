"""An app: handlers and schedules in one file, run by `custody work examples/app.py` or by this file itself.

Run as a program it publishes some orders, waits until they are handled, and stops.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from decimal import Decimal

import custody
from custody import Policy

app = custody.App("shop")


@dataclass
class Order:
    sku: str
    amount: Decimal


@app.on("shop-orders", group="billing", policy=Policy(ordering="key", max_attempts=5), payload=Order, concurrency=4)
def bill(message: custody.Message) -> None:
    order = message.as_(Order)
    print(f"billed {order.amount} for {order.sku}", flush=True)


@app.on("shop-orders", group="audit")
async def note(message: custody.Message) -> None:
    """Another group of the same topic gets each message too, here as plain JSON. A coroutine function will do."""
    print(f"noted {message.payload['sku']}", flush=True)


@app.every("5m")
def refresh_prices() -> None:
    print("prices are fresh", flush=True)


@app.cron("0 6 * * mon-fri", tz="Europe/Berlin", missed="catch_up")
def report(message: custody.Message) -> None:
    print(f"report for {message.headers['x-custody-scheduled-at']}", flush=True)


def main() -> None:
    with custody.connect() as c:
        running = app.start(c)
        working = threading.Thread(target=running.run)
        working.start()
        c.publish_many("shop-orders", [Order("SKU-1", Decimal("9.90")), Order("SKU-2", Decimal("0.10"))])
        c.publish("shop-orders", {"sku": "SKU-3", "amount": "a lot"})  # does not fit: dead at once
        c.run_schedule("report")  # now, and not at six
        while any(c.stats(topic, group).depth for topic, group in (name.split("/") for name in running.workers)):
            working.join(0.05)
        running.stop()
        working.join()
        for letter in c.dead("shop-orders", "billing"):
            print(letter.last_error)
        for schedule in c.schedules():
            print(schedule.name, schedule.every or schedule.cron, schedule.state)


if __name__ == "__main__":
    main()
