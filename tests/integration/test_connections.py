"""How many connections a program takes, as docs/production.md counts them."""

from __future__ import annotations

import threading

import psycopg
import pytest
from tests.waiting import wait_for

import custody

pytestmark = pytest.mark.own_database

OURS = (
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND backend_type = 'client backend' "
    "AND pid <> pg_backend_pid()"
)


def test_a_program_takes_its_pool_and_two(database_url: str) -> None:
    with (
        custody.connect(database_url, pool_size=3) as c,
        psycopg.connect(database_url, autocommit=True) as db,
    ):
        c.create_topic("orders")
        c.create_group("orders", "stock")
        most, seen, enough = 0, [], threading.Event()

        def handle(message: custody.Message) -> None:
            seen.append(message)
            c.stats("orders", "stock")  # handlers share the pool
            if len(seen) >= 60:
                enough.set()

        worker = c.worker_for("orders", "stock", handle, concurrency=8)
        threads = [threading.Thread(target=worker.run)]
        threads += [threading.Thread(target=lambda: [c.publish("orders", n) for n in range(10)]) for _ in range(6)]
        for thread in threads:
            thread.start()

        def all_handled() -> bool:
            nonlocal most
            most = max(most, db.execute(OURS).fetchone()[0])
            return enough.is_set()

        wait_for(all_handled, "all are handled")
        worker.stop()
        for thread in threads:
            thread.join()
        assert 3 <= most <= 3 + 2
