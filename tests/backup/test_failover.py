"""A physical replica takes over: what was committed and replicated is there, leases in flight included, and clients
find it by themselves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict
from tests.waiting import wait_for

import custody
from custody import Policy
from custody.errors import DatabaseUnavailable
from custody.store import cluster, embedded
from custody.store.postmaster import Home

pytestmark = pytest.mark.chaos


@contextmanager
def replica_of(primary: embedded.EmbeddedServer, home: Path) -> Iterator[str]:
    """A physical replica of the server, made by pg_basebackup; its URL."""
    place = Home.at(home)
    place.make()
    host = conninfo_to_dict(primary.url)["host"]
    source = f"host={host} port=5432 user=postgres"
    command = [primary.bin_dir / "pg_basebackup", "-D", place.data_dir, "-d", source, "-R", "--checkpoint=fast"]
    assert cluster.spawn(place.user, command).wait(60) == 0
    with place.locked():
        place._launch({})

    def url() -> str | None:
        found = place.postmaster()
        return found.url if found is not None and found.answers() else None

    try:
        yield wait_for(url, "the replica answers")
    finally:
        embedded.stop(home, "immediate")


def test_a_replica_takes_over_with_the_leases_in_flight(base: Path) -> None:
    with embedded.acquire(base / "one") as primary, replica_of(primary, base / "two") as other:
        hosts = [str(conninfo_to_dict(url)["host"]) for url in (primary.url, other)]
        url = f"postgresql://postgres@/custody?host={','.join(hosts)}&port=5432&target_session_attrs=read-write"
        with custody.connect(url) as c:
            c.create_topic("orders")
            c.create_group("orders", "stock", Policy(visibility_timeout="1h", max_attempts=1))
            c.publish_many("orders", list(range(6)))
            c.claim("orders", "stock", max_messages=2).ack()
            lease = c.claim("orders", "stock", max_messages=2)
            c.claim("orders", "stock", max_messages=1).nack(error="broken")
            producer = c.init_producer("shop")
            producer.publish("orders", 6)
            with psycopg.connect(primary.url) as one, psycopg.connect(other, autocommit=True) as two:
                (end,) = one.execute("SELECT pg_current_wal_lsn()").fetchone() or (None,)
                wait_for(
                    lambda: two.execute("SELECT pg_last_wal_replay_lsn() >= %s::pg_lsn", [end]).fetchone() == (True,),
                    "the replica has everything",
                )
                # a reader may use the replica meanwhile
                assert two.execute("SELECT count(*) FROM custody.events").fetchone() == (7,)
                assert two.execute("SELECT count(*) FROM custody.dead_letters").fetchone() == (1,)
            embedded.stop(base / "one", "immediate")
            with pytest.raises(DatabaseUnavailable):
                c.publish("orders", "nobody is there")
            with psycopg.connect(other, autocommit=True) as two:
                assert two.execute("SELECT pg_promote()").fetchone() == (True,)
            assert lease.ack().settled == 2, "leases go on"
            assert [message.payload for message in c.claim("orders", "stock", max_messages=9)] == [5, 6]
            assert [letter.last_error for letter in c.dead("orders", "stock")] == ["broken"]
            assert producer.publish("orders", 7).offset == 7
            assert c.read("orders", 0, offset=7)[0].payload == 7
