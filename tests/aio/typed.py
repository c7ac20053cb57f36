"""What a type checker sees of `custody.aio`: `make lint` checks this file, and nothing runs it."""

from __future__ import annotations

from datetime import datetime
from typing import Any, assert_type
from uuid import UUID

import custody
import custody.aio
from custody import DeadLetter, Delayed, Message, Receipt, Stats
from custody.model.entities import Settled
from custody.worker import WorkerSummary


async def verbs() -> None:
    async with custody.aio.connect("postgresql://…", pool_size=3) as c:
        assert_type(c, custody.aio.Custody)
        assert_type(await c.publish("t", 1, key="k"), Receipt)
        assert_type(await c.publish("t", 1, delay="1s"), Delayed)
        assert_type(await c.publish_many("t", [1, custody.Outgoing(2)]), list[Receipt])
        assert_type(await c.stats("t", "g"), Stats)
        assert_type(await c.dead("t", "g", where_error="timeout%"), list[DeadLetter])
        assert_type(await c.redrive("t", "g", key="k", dry_run=True), list[tuple[int, int]])
        assert_type(await c.work("t", "g", handle), WorkerSummary)
        await c.redrive("t", "g", kee="k")  # type: ignore[call-arg]  # a filter that is misspelt
        await c.publish("t", 1, kee="k")  # type: ignore[call-overload]

        lease = await c.claim("t", "g", max_messages=10)
        assert_type(lease, custody.aio.Lease)
        assert_type(list(lease), list[Message])
        assert_type(lease.lease_id, UUID)
        assert_type(await lease.ack(*lease, connection=None), Settled)
        assert_type(await lease.next(), custody.aio.Lease)
        assert_type(await lease.extend("1m"), datetime)
        await c.claim("t", "g", settle=lease)

        producer = await c.init_producer("p")
        assert_type(producer, custody.aio.IdempotentProducer)
        async with producer.transaction(timeout="10s") as transaction:
            assert_type(transaction, custody.aio.Transaction)
            await transaction.ack(lease, lease.messages[0])
        assert_type(await producer.transaction(), custody.aio.Transaction)
    assert_type(await custody.aio.connect(), custody.aio.Custody)


async def connections(session: Any, message: Message) -> None:
    assert_type(await custody.aio.outbox.write(session, event_type="placed", payload=1), UUID)
    assert_type(await custody.aio.once(session, "g", message), bool)


async def handle(message: Message) -> None: ...
