"""An order and its event in one transaction, killed at random: in the end the books balance.

The shop writes each order with SQLAlchemy, and the event beside it through the outbox; now and then a customer thinks
better of it, and the transaction is rolled back. The accountant enters each event in the books and acknowledges it in
one transaction. Both are killed with -9 again and again. Nothing else runs: claims move the events into the topic.

It needs custody[embedded] and SQLAlchemy: pip install sqlalchemy
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time

from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session

import custody

ORDERS = 300
KILLS = 3
SCHEMA = """
DROP TABLE IF EXISTS orders, books;
CREATE TABLE orders (n int PRIMARY KEY, customer text NOT NULL, amount int NOT NULL);
CREATE TABLE books (n int PRIMARY KEY, amount int NOT NULL);
"""


def shop(url: str) -> None:
    """Places the orders that are not there yet."""
    engine = create_engine(url.replace("postgresql://", "postgresql+psycopg://", 1))
    with Session(engine) as session:
        placed = set(session.scalars(text("SELECT n FROM orders")))
        for n in range(ORDERS):
            if n in placed:
                continue
            order = {"n": n, "customer": f"customer {n % 7}", "amount": n * 31 % 97}
            for thinks_better_of_it in (random.random() < 0.1, False):
                session.execute(text("INSERT INTO orders VALUES (:n, :customer, :amount)"), order)
                custody.outbox.write(
                    session,
                    event_type="order-placed",
                    payload=order,
                    destination="orders-placed",
                    ordering_key=order["customer"],
                )
                if not thinks_better_of_it:
                    session.commit()
                    break
                session.rollback()


def accountant(url: str) -> None:
    """Enters what was ordered, each order once: the entry and the ack are one transaction."""
    engine = create_engine(url.replace("postgresql://", "postgresql+psycopg://", 1))
    with custody.connect(url) as c:
        while True:
            lease = c.claim("orders-placed", "books", max_messages=20, visibility_timeout="1s")
            for message in lease:
                with Session(engine) as session:
                    session.execute(text("INSERT INTO books VALUES (:n, :amount)"), message.payload)
                    try:
                        lease.ack(message, connection=session)
                    except custody.LeaseLost:
                        break  # killed time: another one has it, and this entry is rolled back
                    session.commit()
            if not lease:
                time.sleep(0.02)


def start(part: str, url: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, __file__, part, url])


def main() -> None:
    with custody.connect() as c:
        engine = create_engine(c.database_url.replace("postgresql://", "postgresql+psycopg://", 1))
        with engine.begin() as connection:
            connection.execute(text(SCHEMA))
        if "orders-placed" in {topic.name for topic in c.topics()}:
            c.delete_topic("orders-placed")
        c.create_topic("orders-placed", partitions=2)
        c.create_group("orders-placed", "books", custody.Policy(ordering="key"))

        parts = {part: start(part, c.database_url) for part in ("shop", "accountant")}
        try:
            for _ in range(KILLS):
                time.sleep(random.uniform(0.8, 1.5))
                for part, process in parts.items():
                    process.send_signal(signal.SIGKILL)
                    process.wait()
                    parts[part] = start(part, c.database_url)
                print("killed both, and started them again")
            parts["shop"].wait()
            with engine.connect() as connection:
                while True:
                    books = connection.execute(text("SELECT count(*), sum(amount) FROM books")).one()
                    orders = connection.execute(text("SELECT count(*), sum(amount) FROM orders")).one()
                    connection.rollback()
                    if books == orders:
                        break
                    time.sleep(0.1)
        finally:
            for process in parts.values():
                process.kill()
                process.wait()
        print(f"{orders[0]} orders of {orders[1]} in all, {books[0]} entries of {books[1]} in all")


if __name__ == "__main__":
    if len(sys.argv) == 1:
        main()
    else:
        {"shop": shop, "accountant": accountant}[sys.argv[1]](sys.argv[2])
