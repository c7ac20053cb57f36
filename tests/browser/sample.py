"""Groups in every state, with payloads of a small shop."""

from __future__ import annotations

import custody

SHOP = "orders"


def raised(text: str) -> TimeoutError:
    """An error with a traceback."""
    try:
        raise TimeoutError(text)
    except TimeoutError as error:
        return error


def fill(c: custody.Custody) -> None:
    """orders: in billing keys are held by dead messages, in mail they wait for a retry, nobody claims for audit."""
    hour = custody.Constant("1h")
    c.create_topic(SHOP, partitions=3)
    c.create_group(SHOP, "billing", custody.Policy(ordering="key", max_attempts=2, on_dead="hold", backoff=hour))
    c.create_group(SHOP, "mail", custody.Policy(ordering="key", max_attempts=5, backoff=hour))
    c.create_group(SHOP, "audit")
    for topic in ("payments", "stock", "parcels"):
        c.create_topic(topic, partitions=2)
        for group in ("ledger", "search"):
            c.create_group(topic, group)
    c.publish_many(
        SHOP,
        [
            custody.Outgoing(
                {"order": number, "sku": f"SKU-{number % 40}", "units": number % 7 + 1},
                key=f"SKU-{number % 40}",
                headers={"shop": "north"},
            )
            for number in range(3000)
        ],
    )
    c.publish_many("stock", [custody.Outgoing({"n": number}) for number in range(900)])
    _work(c, "billing", failing=("SKU-0", "SKU-1", "SKU-2"), dead=("SKU-0", "SKU-1"))
    _work(c, "mail", failing=("SKU-0", "SKU-7"))
    c.claim(SHOP, "billing", max_messages=60, partition=2)
    c.claim("stock", "ledger", max_messages=500).ack()
    c.pause("payments", "ledger", reason="the bank is closed")


def _work(c: custody.Custody, group: str, *, failing: tuple[str, ...], dead: tuple[str, ...] = ()) -> None:
    """Works on some leases; the first message of each failing key fails, of a dead one for good."""
    failed: set[str | None] = set()
    for number in range(6):
        lease = c.claim(SHOP, group, max_messages=150, partition=number % 3)
        for message in lease.messages:
            if message.key in failing and message.key not in failed:
                failed.add(message.key)
                error = raised(f"no answer of payments.example for {message.key}")
                lease.nack(message, error=error, requeue=message.key not in dead)
        lease.ack(*[message for message in lease.messages if message.key not in failing])
