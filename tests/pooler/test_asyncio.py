"""asyncio behind a connection pooler."""

from __future__ import annotations

import asyncio
from datetime import UTC

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict
from tests.aio.conftest import on_loop

import custody.aio
from custody.errors import Busy

pytestmark = [pytest.mark.pooler, pytest.mark.req("X3", "X12")]


@on_loop
async def test_many_tasks_share_few_backends_and_none_gets_the_answer_of_another(pooled_url: str) -> None:
    async with custody.aio.connect(pooled_url, pool_size=8) as c:
        assert c._of._db.pooled

        async def life(name: str) -> None:
            await c.create_topic(name)
            await c.create_group(name, "g")
            for n in range(10):
                assert (await c.publish(name, n)).offset == n
                (message,) = lease = await c.claim(name, "g")
                assert (message.topic, message.payload, message.published_at.tzinfo) == (name, n, UTC)
                assert (await lease.ack()).settled == 1
            assert len(await c.publish_many(name, list(range(3000)))) == 3000
            assert len(await c.publish_many(name, ["x" * 1000] * 2000)) == 2000  # by COPY

        await asyncio.gather(*(life(f"t{n}") for n in range(8)))


@on_loop
async def test_a_statement_that_takes_too_long_or_is_cancelled_is_given_up(
    pooled_url: str, db: psycopg.Connection
) -> None:
    async with custody.aio.connect(pooled_url, statement_timeout="300ms", pool_size=1) as c:
        await c.create_topic("t")
        with psycopg.connect(pooled_url) as holder:
            holder.execute("LOCK TABLE custody.log")
            with pytest.raises(Busy):
                await c.publish("t", 1)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await c.publish("t", 2)
        assert (await c.publish("t", 3)).offset == 0


@on_loop
async def test_a_database_with_another_isolation_level_works(pooled_url: str, db: psycopg.Connection) -> None:
    database = sql.Identifier(str(conninfo_to_dict(pooled_url)["dbname"]))
    db.execute(sql.SQL("ALTER DATABASE {} SET default_transaction_isolation = 'serializable'").format(database))
    # backends of the pooler that were opened before know nothing of it
    db.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )
    async with custody.aio.connect(pooled_url) as c:
        assert c._of._db.isolation_default == "serializable"
        await c.create_topic("t")
        await c.create_group("t", "g")
        await c.publish_many("t", [1, 2])
        assert (await (await c.claim("t", "g", max_messages=2)).ack()).settled == 2
