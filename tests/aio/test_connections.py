"""Connections and sessions of the application: events, settles and records in its transaction."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import asyncpg
import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session
from tests.aio.conftest import on_loop
from tests.http.conftest import served

import custody
import custody.aio
from custody.errors import DatabaseUnavailable, InvalidArgument, LeaseLost, TopicNotFound
from custody.outbox import Outbox

pytestmark = [pytest.mark.core, pytest.mark.req("O1", "X12")]


@asynccontextmanager
async def of_psycopg(url: str) -> AsyncIterator[Any]:
    async with await psycopg.AsyncConnection.connect(url) as connection:
        yield connection


@asynccontextmanager
async def of_sqlalchemy(url: str) -> AsyncIterator[Any]:
    engine = create_async_engine(url.replace("postgresql://", "postgresql+psycopg://", 1))
    try:
        async with engine.connect() as connection:
            yield connection
    finally:
        await engine.dispose()


@asynccontextmanager
async def session(url: str) -> AsyncIterator[Any]:
    engine = create_async_engine(url.replace("postgresql://", "postgresql+psycopg://", 1))
    try:
        async with AsyncSession(engine) as opened:
            yield opened
    finally:
        await engine.dispose()


ways = pytest.mark.parametrize("way", [of_psycopg, of_sqlalchemy, session], ids=lambda way: way.__name__)


@ways
@on_loop
async def test_an_event_and_its_change_share_one_fate(url: str, way: Any) -> None:
    async with custody.aio.connect(url) as c, way(url) as connection:
        for n in (1, 2):
            await custody.aio.outbox.lock(connection, ["a", "b"])
            await custody.aio.outbox.write(
                connection, event_type="placed", payload={"n": n}, destination="orders", ordering_key="a"
            )
            await (connection.rollback() if n == 1 else connection.commit())
        lease = await c.claim("orders", "stock", max_messages=10)
        lease = lease or await c.claim("orders", "stock", max_messages=10, partition=1)
        assert [message.payload for message in lease] == [{"n": 2}]


@ways
@on_loop
async def test_an_ack_and_a_record_are_part_of_the_transaction(url: str, way: Any) -> None:
    async with custody.aio.connect(url) as c, way(url) as connection:
        await c.publish("orders", 1, partition=0)
        lease = await c.claim("orders", "stock", partition=0)
        (message,) = lease
        for again in (True, False):
            assert await custody.aio.once(connection, "stock", message)
            assert not await custody.aio.once(connection, "stock", message)
            assert (await lease.ack(message, connection=connection)).settled == 1
            assert (await c.stats("orders", "stock")).in_flight == 1
            await (connection.rollback() if again else connection.commit())
        assert (await c.stats("orders", "stock")).in_flight == 0
        assert await custody.aio.forget_once(connection, older_than="1h") == 0
        with pytest.raises(LeaseLost):
            await lease.nack(message, error="too late", connection=connection)
        await connection.rollback()


@on_loop
async def test_blocking_connections_are_refused(url: str) -> None:
    engine = create_engine(url.replace("postgresql://", "postgresql+psycopg://", 1))
    with psycopg.connect(url) as plain, Session(engine) as session, engine.connect() as connection:
        for given in (plain, session, connection, object()):
            with pytest.raises(InvalidArgument, match="asynchronous") as refused:
                await custody.aio.outbox.write(given, event_type="placed", payload=1)
            assert "create_async_engine('postgresql+psycopg://…')" in refused.value.remedy
        assert not session.in_transaction()
    engine.dispose()


@asynccontextmanager
async def asyncpg_session(url: str) -> AsyncIterator[Any]:
    engine = create_async_engine(url.replace("postgresql://", "postgresql+asyncpg://", 1))
    try:
        async with AsyncSession(engine) as opened:
            yield opened
    finally:
        await engine.dispose()


@on_loop
async def test_asyncpg_is_enough_for_the_outbox(url: str) -> None:
    given, later = uuid4(), datetime(2040, 1, 1, tzinfo=UTC)
    async with asyncpg_session(url) as session:
        for n in (1, 2):
            await custody.aio.outbox.lock(session, ["a", "b"])
            written = await custody.aio.outbox.write(
                session,
                event_type="placed",
                payload={"n": n},
                destination="orders",
                headers={"trace": "it's \N{SNOWMAN}"},
                partition_key="p",
                ordering_key="a",
                available_at=later,
                event_id=given,
            )
            await (session.rollback() if n == 1 else session.commit())
        with pytest.raises(TopicNotFound):
            await custody.aio.outbox.write(session, event_type="placed", payload=1, destination="nowhere")
        await session.rollback()
        await custody.aio.outbox.write(session, event_type="empty", payload=b"\x00\xff", destination="orders")
        await session.commit()
    with Outbox(url) as outbox:
        empty, event = sorted(outbox.events(), key=lambda event: event.event_type)
    assert (empty.event_type, empty.payload) == ("empty", b"\x00\xff")
    assert written == event.event_id == given
    assert (event.payload, event.ordering_key, event.partition_key) == ({"n": 2}, "a", "p")
    assert event.headers.items() >= {"trace": "it's \N{SNOWMAN}"}.items()
    assert event.available_at == later


@on_loop
async def test_a_bare_connection_of_asyncpg_has_to_be_in_a_transaction(url: str, db: psycopg.Connection[Any]) -> None:
    where = conninfo_to_dict(url)
    connection = await asyncpg.connect(
        user=where["user"], password=where.get("password"), host=where.get("host"), port=where.get("port"),
        database=where["dbname"],
    )  # fmt: skip
    try:
        with pytest.raises(InvalidArgument, match="not in a transaction"):
            await custody.aio.outbox.write(connection, event_type="placed", payload=1)
        async with connection.transaction():
            await custody.aio.outbox.write(connection, event_type="placed", payload=1, destination="test:")
        await connection.transaction().start()
        db.execute("SELECT pg_terminate_backend(%s)", [connection.get_server_pid()])
        with pytest.raises(DatabaseUnavailable):
            await custody.aio.outbox.lock(connection, ["a"])
    finally:
        connection.terminate()
    with Outbox(url) as outbox:
        assert len(outbox.events()) == 1


@on_loop
async def test_asyncpg_is_refused_elsewhere_with_the_reason(url: str) -> None:
    async with asyncpg_session(url) as session:
        with pytest.raises(InvalidArgument, match="only the outbox takes a connection of asyncpg"):
            await custody.aio.once(session, "stock", await _delivered(url))


async def _delivered(url: str) -> custody.Message:
    async with custody.aio.connect(url) as c:
        await c.publish("orders", 1, partition=0)
        return (await c.read("orders", 0))[0]


@ways
def test_blocking_calls_refuse_an_asynchronous_connection_and_name_the_others(url: str, way: Any) -> None:
    async def given() -> None:
        async with way(url) as connection:
            with pytest.raises(InvalidArgument, match="is asynchronous") as refused:
                custody.outbox.write(connection, event_type="placed", payload=1)
            assert "custody.aio.outbox.write" in refused.value.remedy

    asyncio.run(given())


@on_loop
async def test_a_blocking_call_in_run_sync_is_refused(url: str) -> None:
    async with session(url) as opened:

        def write(blocking: Session) -> None:
            blocking.execute(text("SELECT 1"))
            custody.outbox.write(blocking, event_type="placed", payload=1)

        with pytest.raises(InvalidArgument, match=r"connection is asynchronous"):
            await opened.run_sync(write)


@pytest.mark.parametrize("transport", ["direct", "http"])
def test_another_event_loop_is_refused(c: custody.Custody, url: str, transport: str) -> None:
    async def opened(at: str) -> custody.aio.Custody:
        return await custody.aio.connect(at)

    with served(c) as server, asyncio.Runner() as one, asyncio.Runner() as another:
        client = one.run(opened(server.url if transport == "http" else url))
        with pytest.raises(InvalidArgument, match="another event loop"):
            another.run(client.publish("orders", 1))
        assert one.run(client.publish("orders", 2, partition=0)).offset == 0
        one.run(client.close())


@on_loop
async def test_over_http_a_settle_cannot_be_part_of_a_transaction(c: custody.Custody, url: str) -> None:
    with served(c) as server:
        async with custody.aio.connect(server.url) as remote, of_psycopg(url) as connection:
            await remote.publish("orders", 1, partition=0)
            lease = await remote.claim("orders", "stock", partition=0)
            with pytest.raises(custody.errors.NeedsDatabase):
                await lease.ack(connection=connection)
            assert (await lease.ack()).settled == 1
