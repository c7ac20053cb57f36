"""A FastAPI application that places orders: the order and its event are one transaction, and a worker sends a mail.

Run as a program it serves itself, places some orders, waits for the mails, and stops. To serve others:
`uvicorn fastapi_orders:app`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import httpx
import uvicorn
from fastapi import FastAPI, HTTPException, Request
from pydantic import BaseModel
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine

import custody
import custody.aio

SCHEMA = "CREATE TABLE IF NOT EXISTS fastapi_orders (n serial PRIMARY KEY, customer text NOT NULL, amount int NOT NULL)"
TOPIC, GROUP = "fastapi-orders", "mail"
TRIED = [{"customer": "ann", "amount": 3}, {"customer": "bob", "amount": 0}, {"customer": "cy", "amount": 5}]
sent: list[str] = []
"""To whom this process has sent mails."""


class Order(BaseModel):
    customer: str
    amount: int


async def send_mail(message: custody.Message) -> None:
    """Runs on the event loop of the application. It would await a mail server here."""
    print(f"mail to {message.payload['customer']}: {message.payload['amount']}", flush=True)
    sent.append(message.payload["customer"])


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with custody.aio.connect() as c:
        engine = create_async_engine(c.database_url.replace("postgresql://", "postgresql+psycopg://", 1))
        async with engine.begin() as connection:
            await connection.execute(text(SCHEMA))
        await c.ensure_topic(TOPIC, partitions=2)
        await c.ensure_group(TOPIC, GROUP, custody.Policy(ordering="key", max_attempts=5))
        worker = asyncio.create_task(c.work(TOPIC, GROUP, send_mail))
        app.state.custody, app.state.transaction = c, async_sessionmaker(engine).begin
        try:
            yield
        finally:
            worker.cancel()  # the mails that are being sent are finished
            with suppress(asyncio.CancelledError):
                await worker
            await engine.dispose()


app = FastAPI(lifespan=lifespan)


@app.post("/orders", status_code=201)
async def place(order: Order, request: Request) -> dict[str, int]:
    session: AsyncSession
    # committed here and not in a dependency, which may end when the answer has been sent
    async with request.app.state.transaction() as session:
        values = {"customer": order.customer, "amount": order.amount}
        insert = text("INSERT INTO fastapi_orders (customer, amount) VALUES (:customer, :amount) RETURNING n")
        number: int = (await session.execute(insert, values)).scalar_one()
        await custody.aio.outbox.write(
            session, event_type="order-placed", payload=values, destination=TOPIC, ordering_key=order.customer
        )
        if order.amount <= 0:
            raise HTTPException(409, "nothing was ordered")  # neither the order nor its event
    request.app.state.custody.hint([TOPIC])  # the worker need not wait for its next poll
    return {"order": number}


@app.get("/mails")
async def mails(request: Request) -> dict[str, int]:
    stats = await request.app.state.custody.stats(TOPIC, GROUP)
    return {"sent": len(sent), "dead": stats.dead}


async def main() -> None:
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    serving = asyncio.create_task(server.serve())
    while not server.started:
        if serving.done():
            await serving
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        for order in TRIED:
            answer = await client.post("/orders", json=order)
            print(f"order of {order['customer']}: {answer.status_code}", flush=True)
        while (mails := (await client.get("/mails")).json())["sent"] < 2:
            await asyncio.sleep(0.05)
        print(f"{mails['sent']} mails were sent, {mails['dead']} failed")
    server.should_exit = True
    await serving


if __name__ == "__main__":
    asyncio.run(main())
