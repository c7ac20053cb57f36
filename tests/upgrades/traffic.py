"""Publishes and consumes until its standard input ends, in many ways. Then prints what it did, and every error.

Arguments: the URL of the database, and a name. Prints a line for each round. With `--until-refused` it ends at the
first error, which it prints.
"""

from __future__ import annotations

import json
import sys
import threading

import psycopg

import custody
from custody import Outgoing
from custody.errors import CustodyError


def main(url: str, name: str, *options: str) -> None:
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    sent, handled, errors, rounds = 0, 0, [], 0
    with (
        custody.connect(url, worker=name, pool_size=3) as c,
        psycopg.connect(url, autocommit=True, prepare_threshold=None) as mine,  # there may be a pooler
    ):
        release = c._db._schema.release
        while not ended.is_set():
            try:
                c.publish("orders", {"by": name}, key=f"{name}-{rounds % 7}")
                c.publish_many("orders", [Outgoing({"by": name}, key=f"{name}-{n}") for n in range(3)])
                sent += 4
                with mine.transaction():  # a transaction of the application's own
                    custody.outbox.write(mine, event_type="paid", payload={"by": name}, destination="test:")
                    lease = c.claim("orders", "stock", max_messages=4)
                    if lease:
                        handled += lease.ack(connection=mine).settled
                lease = c.claim("orders", "stock", max_messages=2)
                while lease:
                    count = len(lease)
                    following = lease.next()
                    handled, lease = handled + count, following
                lease = c.claim("orders", "stock", max_messages=1)
                if lease:
                    lease.nack(delay="0s")
                assert c.stats("orders", "stock").dead == 0
                assert [topic.name for topic in c.topics()] == ["orders"]
                c.dead("orders", "stock")
            except CustodyError as error:
                errors.append([error.code, error.message, error.remedy])
                if "--until-refused" in options:
                    break
            rounds += 1
            print(json.dumps({"rounds": rounds, "errors": len(errors)}), flush=True)
    print(json.dumps({"release": release, "sent": sent, "handled": handled, "errors": errors}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
