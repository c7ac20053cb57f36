"""A dump and its restore: nothing is lost, what was in flight is delivered again, and what an older state means."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from tests.conformance.conftest import refused
from tests.conformance.roles import as_role, granting, name_of
from tests.conftest import Clock
from tests.databases import Copy

import custody
from custody import Constant, Policy
from custody.errors import ProducerFenced, SequenceConflict
from custody.outbox import write
from custody.relay import Relay
from custody.store import embedded

pytestmark = [pytest.mark.chaos, pytest.mark.own_database]

Restore = Callable[..., str]
PAYLOADS = list(range(10))


@pytest.fixture
def dump(database_url: str, tmp_path: Path) -> Callable[[], Path]:
    def dumped() -> Path:
        path = tmp_path / "custody.dump"
        _run("pg_dump", "--format=custom", f"--file={path}", database_url)
        return path

    return dumped


@pytest.fixture
def restore(server_url: str) -> Iterator[Restore]:
    with ExitStack() as stack:

        def restored(path: Path, *options: str) -> str:
            copy = stack.enter_context(closing(Copy(server_url)))
            _run("pg_restore", "--exit-on-error", *options, f"--dbname={copy.url}", str(path))
            return copy.url

        yield restored


def _run(program: str, *arguments: str) -> None:
    done = subprocess.run([embedded.binaries() / program, *arguments], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def rest(c: custody.Custody, topic: str = "orders") -> list[Any]:
    """Everything that its group still gets."""
    found = []
    while lease := c.claim(topic, "stock", max_messages=100):
        found += [message.payload for message in lease]
        lease.ack()
    return found


def test_what_was_in_flight_is_delivered_again_and_nothing_is_lost(
    database_url: str, clock: Clock, dump: Callable[[], Path], restore: Restore
) -> None:
    with custody.connect(database_url, clock=clock) as c:
        c.create_topic("orders")
        c.create_group("orders", "stock", Policy(ordering="key", max_attempts=1, backoff=Constant("0s")))
        for n in PAYLOADS:
            c.publish("orders", n, key=str(n))
        c.publish_delayed("orders", [custody.Outgoing("later", delay="1h")])
        done = c.claim("orders", "stock", max_messages=2)
        dead = c.claim("orders", "stock", max_messages=1)
        in_flight = c.claim("orders", "stock", max_messages=3)
        done.ack()
        dead.nack(error="broken")
        with psycopg.connect(database_url) as mine:
            write(mine, event_type="paid", payload=1, destination="test:")
        before = c.stats("orders", "stock")
        path = dump()
        assert in_flight.ack().settled == 3  # the original goes on
    for _ in range(2):  # a second restore is like the first
        with custody.connect(restore(path), clock=clock) as c:
            assert c.stats("orders", "stock") == before
            assert c.trace("orders", 0, 0)
            got = rest(c)
            held = payloads(in_flight)
            assert sorted([*payloads(done), *payloads(dead), *held, *got]) == PAYLOADS
            clock.move(31)
            assert sorted(rest(c)) == sorted(held), "after the deadline"
            (letter,) = c.dead("orders", "stock")
            assert (letter.payload, letter.last_error) == (payloads(dead)[0], "broken")
            assert len(c.redrive("orders", "stock")) == 1
            assert rest(c) == payloads(dead)
            clock.move(3600)
            assert rest(c) == ["later"]
            assert c.publish("orders", 11, key="0").offset > 0
            assert Relay(c.database_url, {"test": lambda _: None}).drain("20s").published == 1
        clock.time -= timedelta(seconds=3631)


def payloads(lease: custody.Lease) -> list[Any]:
    return [message.payload for message in lease]


def test_a_late_settle_of_a_lease_from_before_is_as_good_as_in_the_original(
    database_url: str, clock: Clock, dump: Callable[[], Path], restore: Restore
) -> None:
    """The worker did not notice the restore: its lease is in the dump, and holds until its deadline."""
    with custody.connect(database_url, clock=clock) as c:
        c.create_topic("orders")
        c.create_group("orders", "stock")
        c.publish_many("orders", PAYLOADS)
        first, second = (c.claim("orders", "stock", max_messages=3) for _ in range(2))
        path = dump()
    with custody.connect(restore(path), clock=clock) as c:
        c.settle(first.lease_id, custody.Outcome("ack"))
        clock.move(31)
        assert payloads(c.claim("orders", "stock")) == payloads(second)[:1], "back, in a smaller lease"
        with refused("lease_lost"):
            c.settle(second.lease_id, custody.Outcome("ack"))


def test_grants_come_with_the_dump_or_are_given_anew(
    database_url: str, server_url: str, dump: Callable[[], Path]
) -> None:
    with custody.connect(database_url) as c:
        c.create_topic("orders")
    with granting(database_url), closing(Copy(server_url)) as same, closing(Copy(server_url)) as other:
        path = dump()
        _run("pg_restore", "--exit-on-error", f"--dbname={same.url}", str(path))
        with custody.connect(as_role(same.url, "app")) as app:
            app.publish("orders", 1)
        same.close()
        # as on a server that does not have the roles
        _run("pg_restore", "--exit-on-error", "--no-privileges", f"--dbname={other.url}", str(path))
        with refused("permission_denied"):
            custody.connect(as_role(other.url, "app"))
        with custody.connect(other.url) as owner:
            owner.grants("app", to=name_of("app"))
        with custody.connect(as_role(other.url, "app")) as app:
            app.publish("orders", 2)
        other.close()  # its roles are dropped next


def test_after_an_older_state_offsets_and_sequences_are_given_again(
    database_url: str, dump: Callable[[], Path], restore: Restore
) -> None:
    with custody.connect(database_url) as c:
        c.create_topic("orders")
        c.create_group("orders", "stock")
        producer = c.init_producer("shop")
        producer.publish("orders", "before")
        path = dump()
        producer.publish("orders", "lost by the restore")
        with psycopg.connect(database_url) as mine:
            for message in c.claim("orders", "stock", max_messages=2):
                assert custody.once(mine, "stock", message)
        producer_epoch = producer.epoch
    url = restore(path)
    with psycopg.connect(database_url) as records, psycopg.connect(url) as mine:
        # as if the records of the consumer were in a database of its own, which nobody restored
        with records.cursor().copy("COPY custody_once TO STDOUT") as old:
            text = b"".join(old)
        with custody.connect(url) as c:
            c.create_topic("nothing")
            custody.once(mine, "nobody", probe(c))
            with mine.cursor().copy("COPY custody_once FROM STDIN") as new:
                new.write(text)
            mine.commit()

            # the producer goes on from what the database knows
            with pytest.raises(SequenceConflict):
                c.publish_many("orders", ["next"], producer_id="shop", epoch=producer_epoch, sequence=2)
            known = c.producer("shop")
            assert (known.last_sequence, known.epoch) == (0, producer_epoch)
            again = c.init_producer("shop")
            with pytest.raises(ProducerFenced):
                c.publish_many("orders", ["next"], producer_id="shop", epoch=producer_epoch, sequence=1)
            assert again.publish("orders", "sent again").offset == 1

            # the offset 1 is another message now: its record has to go, that of offset 0 stays
            first, second = c.claim("orders", "stock", max_messages=2)
            assert not custody.once(mine, "stock", second), "taken for the one that was lost"
            mine.rollback()
            topic = c.topic("orders")
            c.delete_topic("nothing")
            forget(mine, topic, ends_of_the_dump=[1])
            assert not custody.once(mine, "stock", first), "handled before the restore"
            assert custody.once(mine, "stock", second)


def probe(c: custody.Custody) -> custody.Message:
    c.publish("nothing", 1)
    c.create_group("nothing", "nobody")
    (message,) = c.claim("nothing", "nobody")
    return message


def forget(connection: psycopg.Connection[Any], topic: custody.Topic, ends_of_the_dump: list[int]) -> None:
    for partition, end in enumerate(ends_of_the_dump):
        connection.execute(
            'DELETE FROM custody_once WHERE topic_uid = %s AND partition = %s AND "offset" >= %s',
            [topic.uid, partition, end],
        )


def test_a_pipeline_can_be_given_another_id(database_url: str, dump: Callable[[], Path], restore: Restore) -> None:
    """The statement of docs/production.md: writers that go by `write.uid` and `write.claim` see another pipeline."""
    with custody.connect(database_url) as c:
        c.create_topic("orders")
        c.create_group("orders", "stock")
        c._db.call_dicts("start_pipeline", topic="orders", group="stock", driver="d", visibility=None, after=None)
    url = restore(dump())
    with psycopg.connect(url) as connection:
        (before,) = connection.execute("SELECT uid FROM custody.pipelines").fetchone() or (None,)
        connection.execute("UPDATE custody.pipelines SET uid = gen_random_uuid()")
        (after,) = connection.execute("SELECT uid FROM custody.pipelines").fetchone() or (None,)
    assert before != after


def test_batches_are_read_and_written_as_before(database_url: str, dump: Callable[[], Path], restore: Restore) -> None:
    """Each segment has functions of its own, which come with its table."""
    with custody.connect(database_url) as c, psycopg.connect(database_url, autocommit=True) as db:
        c.create_topic("orders")
        c.create_group("orders", "stock", Policy(max_attempts=1))
        c.publish_many("orders", list(range(50)))
        db.execute("SELECT custody.seal_segment('orders')")
        c.publish_many("orders", list(range(50, 90)))
        c.claim("orders", "stock", max_messages=7).nack(error="no")
    with custody.connect(restore(dump())) as c:
        c.publish_many("orders", list(range(90, 130)))
        assert [m.payload for m in c.dead("orders", "stock")] == list(range(7))
        c.redrive("orders", "stock")
        assert sorted(rest(c)) == list(range(130))
        c.delete_topic("orders")
