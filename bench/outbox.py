"""The outbox: writing events, relaying them to a topic of another database, and moving them into one of the same."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from time import perf_counter

import custody
from bench.measure import Samples
from bench.report import Row, at_least
from bench.sizes import PAYLOAD_BYTES
from bench.stage import Connection, Stage, plain
from custody.relay import CustodyPublisher, Relay

BATCH = 500
TARGET = 20_000
CHUNK = 5_000
EVENTS_OF_A_KEY = 5  # one after the other: a key that returned in every batch would let one relay work at a time
_FILL = (
    "SELECT count(custody.outbox_add('placed', 'b', %s, %s, p_ordering_key => 'key ' || n / %s)) "
    "FROM generate_series(%s::int, %s::int) n"
)


def rows(stage: Stage) -> Iterator[Row]:
    yield written(stage)
    one = relayed(stage, 1)
    three = relayed(stage, 3)
    yield Row(
        what=f"outbox to another Custody, 1 relay, batch {BATCH}",
        measured=one,
        unit="events/s",
        target=at_least(TARGET),
    )
    yield Row(
        what=f"  3 relays, batch {BATCH}",
        measured=three,
        unit="events/s",
        beside="1 relay",
        other=one,
        ratio=three / one,
    )
    yield moved(stage)


def fill(connection: Connection, destination: str, events: int) -> None:
    for first in range(0, events, CHUNK):  # a transaction keeps a lock for each of its keys
        last = min(first + CHUNK, events) - 1
        connection.execute(_FILL, [os.urandom(PAYLOAD_BYTES), destination, EVENTS_OF_A_KEY, first, last])
    connection.execute("VACUUM ANALYZE custody.outbox")


def written(stage: Stage) -> Row:
    """An event for each transaction, as an application writes them, beside a bare INSERT."""
    calls = stage.sizes.batches[1]
    events, inserts = Samples(), Samples()
    with stage.open() as (_, connection):
        connection.execute("CREATE TABLE bare (n bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, payload bytea)")
        payload = os.urandom(PAYLOAD_BYTES)
        for _ in range(stage.sizes.repetitions):
            began = perf_counter()
            for n in range(calls):
                custody.outbox.write(
                    connection, event_type="placed", payload=payload, destination="x:", ordering_key=str(n)
                )
            events.values.append(calls / (perf_counter() - began))
            began = perf_counter()
            for _ in range(calls):
                connection.execute("INSERT INTO bare (payload) VALUES (%s)", [payload])
            inserts.values.append(calls / (perf_counter() - began))
    return Row(
        what="outbox write, one for each transaction",
        measured=events.median,
        unit="events/s",
        beside="bare INSERT",
        other=inserts.median,
        ratio=events.median / inserts.median,
    )


def relay(source: str, target: str) -> None:
    Relay(source, {"elsewhere": CustodyPublisher(target)}, batch=BATCH, poll="5ms").drain()


def relayed(stage: Stage, relays: int) -> float:
    """Events a second until all have arrived in the topic; each relay is a process of its own, started before."""
    events = stage.sizes.outbox_events
    with stage.database() as source, stage.open() as (c, _):
        custody.outbox.install(source)
        c.create_topic("orders")
        with plain(source) as connection:
            fill(connection, "elsewhere:orders", events)
        context = multiprocessing.get_context("spawn")
        processes = [context.Process(target=relay, args=(source, c.database_url)) for _ in range(relays)]
        for process in processes:
            process.start()
        while (begun := c.topic("orders").message_count) == 0:
            pass  # until the first batch is there: what it takes to start Python is not of interest
        began = perf_counter()
        for process in processes:
            process.join()
        took = perf_counter() - began
        assert c.topic("orders").message_count == events
    return (events - begun) / took


def moved(stage: Stage) -> Row:
    """Into a topic of the same database, by claims alone, beside claims of what is in the log already."""
    events = stage.sizes.outbox_events
    with stage.open() as (c, connection):
        c.create_topic("orders")
        c.create_group("orders", "bench")
        fill(connection, "orders", events)
        began = perf_counter()
        consumed = 0
        while consumed < events:
            lease = c.claim("orders", "bench", max_messages=1000)
            consumed += len(lease)
            lease.ack()
        rate = events / (perf_counter() - began)
        c.create_group("orders", "again")
        began = perf_counter()
        while lease := c.claim("orders", "again", max_messages=1000):
            lease.ack()
        plainly = events / (perf_counter() - began)
    return Row(
        what="outbox into the log, by claims of 1,000",
        measured=rate,
        unit="events/s",
        beside="claims of the log",
        other=plainly,
        ratio=rate / plainly,
    )
