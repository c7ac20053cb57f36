"""Consumes, and publishes what follows to two topics with the ack in one transaction, until it is killed.

Arguments: database URL, name. A new instance fences the one before.
"""

from __future__ import annotations

import sys
import time

import custody
from custody.errors import LeaseLost, ProducerFenced, TransactionOver, Transient

if __name__ == "__main__":
    url, name = sys.argv[1:]
    with custody.connect(url, worker=name) as c:
        producer = c.init_producer("transactor")
        print("started")
        while True:
            try:
                lease = c.claim("in", "g", max_messages=7)
                if not lease:
                    time.sleep(0.02)
                    continue
                with producer.transaction(timeout="20s") as tx:
                    for message in lease:
                        tx.publish("left", message.payload, key=message.key)
                        tx.publish_many("right", [custody.Outgoing([message.payload, n]) for n in range(3)])
                    tx.ack(lease)
            except (LeaseLost, TransactionOver):
                pass  # nothing of it was seen; its messages come again
            except ProducerFenced:
                break
            except Transient:
                time.sleep(0.05)
