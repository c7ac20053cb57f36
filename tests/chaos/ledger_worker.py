"""A worker that fails at random and writes each success to the ledger before it says so.

Arguments: database URL, topic, group, name, visibility timeout, share of failures.
Ends when the group has nothing left.
"""

from __future__ import annotations

import random
import sys

import psycopg

import custody
from custody.errors import LeaseLost
from custody.model.outcomes import Outcome


def main(url: str, topic: str, group: str, name: str, visibility: str, failing: str) -> None:
    dice = random.Random(name)
    with custody.connect(url, worker=name, pool_size=2) as c, psycopg.connect(url, autocommit=True) as ledger:
        while True:
            lease = c.claim(topic, group, max_messages=dice.choice([1, 5, 20, 50]), visibility_timeout=visibility)
            if not lease:
                if c.stats(topic, group).depth == 0:
                    return
                ledger.execute("SELECT pg_sleep(0.005)")
                continue
            outcomes: dict[int, Outcome] = {}
            stopped: set[str | None] = set()
            for message in lease:
                if message.key in stopped:
                    continue
                if dice.random() < float(failing):
                    outcomes[message.offset] = Outcome("nack", error="by chance")
                    stopped.add(message.key)
                    continue
                ledger.execute(
                    'INSERT INTO ledger ("offset", key, attempt, worker) VALUES (%s, %s, %s, %s)',
                    (message.offset, message.key, message.attempt, name),
                )
                outcomes[message.offset] = Outcome("ack")
                # now and then one by one, so that a death leaves a lease settled in part
                if dice.random() < 0.2:
                    settle(c, lease, outcomes)
                    outcomes = {}
            settle(c, lease, outcomes)


def settle(c: custody.Custody, lease: custody.Lease, outcomes: dict[int, Outcome]) -> None:
    try:
        if outcomes:
            c.settle(lease.lease_id, outcomes)
    except LeaseLost:
        pass  # too slow: somebody else does it again


if __name__ == "__main__":
    main(*sys.argv[1:])
