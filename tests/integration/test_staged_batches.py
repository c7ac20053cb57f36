"""Tasks of pipelines write finished rows of the log, which nobody sees before the commit gives them their offsets."""

from __future__ import annotations

import random
from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

import psycopg
import pytest
from tests.conftest import Clock

import custody
from custody.errors import StageLost
from custody.model import codec
from custody.model.outcomes import Outcome
from custody.spark.database.tasks import TaskClaim
from custody.verbs import delays
from custody.verbs.pipelines import BatchReport, DriverVerbs, StagedCount, stage_of

pytestmark = [pytest.mark.core, pytest.mark.req("S4")]

PAD = "x" * 100


class Output(NamedTuple):
    """A message for a partition of a topic, and its source."""

    source: tuple[int, int]
    partition: int
    message: custody.Outgoing
    topic: str = "out"
    waits: bool = False


@pytest.fixture
def source(c: custody.Custody) -> custody.Custody:
    c.create_topic("in", partitions=2)
    c.create_topic("out", partitions=2)
    c.create_group("in", "g", custody.Policy(ordering="key", max_attempts=3))
    return c


def claimed(c: custody.Custody, count: int) -> tuple[DriverVerbs, int, list[tuple[int, int]]]:
    """A claim of new messages that have keys of their own, and their places."""
    c.publish_many("in", [custody.Outgoing({"n": n}, key=f"k{n}") for n in range(count)])
    drive, _ = c.drive("in", "g")
    number = drive.claim(count).number or 0
    places = [(part.partition, offset) for part in drive.claimed(number) for r in part.ranges for offset in range(*r)]
    assert len(places) == count
    return drive, number, places


def each(places: Sequence[tuple[int, int]], copies: int = 1) -> list[Output]:
    """Outputs of these messages: to partition 0 and 1 in turn."""
    return [
        Output(
            place, place[1] % 2, custody.Outgoing({"of": list(place), "copy": n, "pad": PAD}, key=f"k{place[1] % 7}")
        )
        for place in places
        for n in range(copies)
    ]


def stage(c: custody.Custody, drive: DriverVerbs, number: int, outputs: Sequence[Output]) -> list[StagedCount]:
    """One attempt of a task with these outputs."""
    staged = TaskClaim(c.database_url, drive.driver.group_id, number).stage()
    for output in outputs:
        encoded = codec.encode_message(output.message)
        staged.add(drive.sink(output.topic), output.partition, output.source, encoded, waits=output.waits)
    return staged.write()


def told(outputs: Sequence[Output], topic: str = "out") -> list[list[object]]:
    """What the partitions of a topic have to say, in the order of these outputs."""
    return [
        [[list(one.source), one.message.key, one.message.headers or {}, one.message.payload["copy"]] for one in outputs
         if one.topic == topic and one.partition == partition and not one.waits]
        for partition in range(2)
    ]  # fmt: skip


def found(c: custody.Custody, topic: str = "out") -> list[list[object]]:
    partitions = [c.read(topic, partition, max_messages=10_000) for partition in range(2)]
    for messages in partitions:
        assert [message.offset for message in messages] == list(range(len(messages)))
        times = [message.published_at for message in messages]
        assert times == sorted(times)
    return [[[m.payload["of"], m.key, dict(m.headers), m.payload["copy"]] for m in part] for part in partitions]


def hidden(db: psycopg.Connection) -> int:
    """Rows of the log that are staged."""
    row = db.execute("SELECT count(*) FROM custody.log WHERE partition < 0").fetchone()
    assert row is not None
    return int(row[0])


def bodies(db: psycopg.Connection) -> int:
    """What is stored beside the rows of the log."""
    row = db.execute(
        "SELECT sum(pg_relation_size(c.reltoastrelid)) FROM pg_class c "
        "WHERE c.relnamespace = 'custody'::regnamespace AND c.relname ~ '^log_[0-9]+$'"
    ).fetchone()
    assert row is not None
    return int(row[0])


def test_a_commit_moves_what_tasks_have_written_and_copies_nothing(
    source: custody.Custody, db: psycopg.Connection
) -> None:
    drive, number, places = claimed(source, 400)
    half = len(places) // 2
    placed = [*stage(source, drive, number, each(places[:half])), *stage(source, drive, number, each(places[half:]))]
    assert hidden(db) >= 4
    before = bodies(db)
    result = drive.commit(number, BatchReport(placed=placed, ran=400))
    assert (result.done, result.outputs) == (400, 400)
    assert (hidden(db), bodies(db)) == (0, before)
    assert found(source) == told(each(places))
    drive.drop_stage(number)
    assert found(source) == told(each(places))


def test_nobody_sees_what_is_staged(source: custody.Custody, db: psycopg.Connection, clock: Clock) -> None:
    source.publish_many("out", [custody.Outgoing({"of": [0, 0], "copy": 0}, partition=p) for p in (0, 1) for _ in "ab"])
    drive, number, places = claimed(source, 100)
    before = source.topic("out")

    def seen() -> object:
        views = "SELECT count(*), min(partition) FROM custody.events WHERE topic = 'out'"
        return (
            found(source),
            source.topic("out"),
            db.execute(
                "SELECT custody.offset_for_time('out', p, %s) FROM generate_series(0, 1) p",
                [clock() + timedelta(days=1)],
            ).fetchall(),
            db.execute(views).fetchone(),
            db.execute("SELECT partition, first_offset, next_offset FROM custody.partitions('out')").fetchall(),
            db.execute("SELECT messages FROM custody.describe_segments('out')").fetchall(),
        )

    first = seen()
    stage(source, drive, number, each(places))
    assert hidden(db) > 0
    assert seen() == first
    assert source.topic("out") == before
    source.publish("out", {"of": [0, 0], "copy": 1}, partition=0, expected_offset=2)
    drive.drop_stage(number)
    assert hidden(db) == 0


def test_attempts_that_died_are_removed_with_the_stage(source: custody.Custody, db: psycopg.Connection) -> None:
    drive, number, places = claimed(source, 100)
    stage(source, drive, number, each(places))
    placed = stage(source, drive, number, each(places))
    stage(source, drive, number, each(places[:40]))
    drive.commit(number, BatchReport(placed=placed, ran=100))
    assert found(source) == told(each(places))
    assert hidden(db) > 0
    drive.drop_stage(number)
    assert hidden(db) == 0
    with pytest.raises(StageLost, match="no stage"):
        stage(source, drive, number, each(places))
    assert found(source) == told(each(places))


def test_a_stage_leaves_the_rows_of_another_alone(source: custody.Custody, db: psycopg.Connection) -> None:
    source.create_group("in", "other", custody.Policy(ordering="key"))
    drive, number, places = claimed(source, 100)
    other, _ = source.drive("in", "other")
    theirs = other.claim(100).number or 0
    placed = stage(source, other, theirs, each(places))
    stage(source, drive, number, each(places))
    drive.drop_stage(number)
    assert hidden(db) == 4
    other.commit(theirs, BatchReport(placed=placed, ran=100))
    assert found(source) == told(each(places))


@pytest.mark.parametrize("exact", [True, False])
def test_a_segment_is_sealed_between_two_attempts(source: custody.Custody, db: psycopg.Connection, exact: bool) -> None:
    drive, number, places = claimed(source, 200)
    placed = stage(source, drive, number, each(places[:100]))
    db.execute("SELECT custody.seal_segment('out')")
    placed += stage(source, drive, number, each(places[100:]))
    source.publish("out", {"of": [9, 9], "copy": 0}, partition=0)
    drive.commit(number, BatchReport(placed=placed, ran=200, exact=exact))
    assert found(source)[1] == told(each(places))[1]
    assert found(source)[0][1:] == told(each(places))[0]
    db.execute("SELECT custody.seal_segment('out')")
    drive.drop_stage(number)
    assert hidden(db) == 0
    assert db.execute("SELECT dropped FROM custody.drop_segments('out')").fetchall() == [(True,), (True,)]
    assert source.publish("out", 1, partition=0).offset == 1 + len(told(each(places))[0])


@pytest.mark.parametrize("exact", [True, False])
def test_a_dropped_segment_takes_what_is_staged_along(
    source: custody.Custody, db: psycopg.Connection, exact: bool
) -> None:
    drive, number, places = claimed(source, 100)
    gone = stage(source, drive, number, each(places[:50]))
    db.execute("SELECT custody.seal_segment('out')")
    assert db.execute("SELECT dropped FROM custody.drop_segments('out')").fetchall() == [(True,)]
    placed = gone + stage(source, drive, number, each(places[50:]))
    with pytest.raises(StageLost, match=r"\d+ of \d+ staged"):
        drive.commit(number, BatchReport(placed=placed, ran=100, exact=exact))
    assert found(source) == [[], []]
    placed = stage(source, drive, number, each(places))
    drive.commit(number, BatchReport(placed=placed, ran=100, exact=exact))
    assert found(source) == told(each(places))
    drive.drop_stage(number)
    assert hidden(db) == 0


def test_what_a_crash_leaves_in_the_log_is_removed(source: custody.Custody, db: psycopg.Connection) -> None:
    """The stage is empty after a crash of the server, and the log is not."""
    drive, number, places = claimed(source, 100)
    placed = stage(source, drive, number, each(places))
    db.execute(f"TRUNCATE custody.{stage_of(drive.driver.group_id, number)}".encode())
    for exact in (True, False):
        with pytest.raises(StageLost, match="0 of"):
            drive.commit(number, BatchReport(placed=placed, ran=100, exact=exact))
    placed = stage(source, drive, number, each(places))
    drive.commit(number, BatchReport(placed=placed, ran=100))
    assert (found(source), hidden(db)) == (told(each(places)), 4)
    drive.drop_stage(number)
    assert hidden(db) == 0


def test_rows_without_their_bodies_refuse_the_commit(source: custody.Custody, db: psycopg.Connection) -> None:
    drive, number, places = claimed(source, 100)
    placed = stage(source, drive, number, each(places))
    db.execute("DELETE FROM custody.log WHERE partition = -1")
    for work in (BatchReport(placed=placed, ran=100), BatchReport(placed=placed, exact=False)):
        with pytest.raises(StageLost, match=r"0 of \d+ staged"):
            drive.commit(number, work)
    assert found(source) == [[], []]


@pytest.mark.parametrize("split", ["stretches", "turns"])
def test_rows_are_cut_where_messages_failed(source: custody.Custody, db: psycopg.Connection, split: str) -> None:
    """Half of them. Attempts may have stretches of the source, or messages in turn; the last one is named first."""
    drive, number, places = claimed(source, 400)
    cut = [places[:200], places[200:]] if split == "stretches" else [places[::2], places[1::2]]
    placed = [place for part in reversed(cut) for place in stage(source, drive, number, each(part, 2))]
    failed = {place for place in places if place[1] % 100 >= 50}
    work = BatchReport(placed=placed, exact=False)
    work.failed = dict.fromkeys(failed, Outcome("nack", error="boom"))
    result = drive.commit(number, work)
    assert result.outputs == 2 * (400 - len(failed))
    assert found(source) == told(each([place for place in places if place not in failed], 2))
    drive.drop_stage(number)
    assert hidden(db) == 0


@pytest.mark.parametrize("exact", [True, False])
def test_small_large_and_delayed_outputs_for_several_topics(source: custody.Custody, clock: Clock, exact: bool) -> None:
    source.create_topic("large", partitions=2)
    drive, number, places = claimed(source, 200)
    ordinary = [
        one._replace(message=custody.Outgoing(one.message.payload, key=one.message.key, headers={"n": "1"}))
        if one.source[1] % 3 == 0
        else one
        for one in each(places)
    ]
    large = [
        one._replace(topic="large", message=custody.Outgoing({**one.message.payload, "pad": PAD * 20}, key="k"))
        for one in each(places[:40])
    ]
    later = custody.Outgoing({"of": [0, 0], "copy": 0}, delay=60)
    delayed = [Output(places[0], 0, custody.Outgoing(later.payload, headers=delays.staged_headers(later)), waits=True)]
    few = each(places[150:160])
    placed = [
        *stage(source, drive, number, [*ordinary[:150], *large, *delayed]),
        *stage(source, drive, number, few),
        *stage(source, drive, number, ordinary[160:]),
    ]
    drive.commit(number, BatchReport(placed=placed, ran=200, exact=exact))
    assert found(source) == told([*ordinary[:150], *few, *ordinary[160:]])
    assert found(source, "large") == told(large, "large")
    assert source.delayed_count("out") == 1


@pytest.mark.parametrize("seed", range(4))
def test_the_order_is_that_of_the_source_whatever_the_attempts_have(
    source: custody.Custody, db: psycopg.Connection, seed: int
) -> None:
    """Attempts with messages in stretches and at random, some messages of which fail, one of them staged twice."""
    chance = random.Random(seed)
    drive, number, places = claimed(source, 600)
    shares: list[list[tuple[int, int]]] = [[] for _ in range(4)]
    mine = 0
    for place in places:
        mine = chance.randrange(4) if chance.random() < (0.02, 0.1, 0.5, 0.01)[seed] else mine
        shares[mine].append(place)
    made = {place: chance.choice([0, 1, 1, 1, 3]) for place in places}
    outputs = [[one for place in share for one in each([place], made[place])] for share in shares]
    stage(source, drive, number, outputs[0])
    placed = [place for share in outputs for place in stage(source, drive, number, share)]
    failed = set(chance.sample(places, (0, 5, 60, 1)[seed]))
    work = BatchReport(placed=placed, exact=False, failed=dict.fromkeys(failed, Outcome("nack", error="boom")))
    drive.commit(number, work)
    expected = [one for place in places if place not in failed for one in each([place], made[place])]
    assert found(source) == told(expected)
    drive.drop_stage(number)
    assert hidden(db) == 0


@pytest.mark.parametrize("cut", [False, True])
def test_messages_of_every_form_stay_what_they_are(source: custody.Custody, cut: bool) -> None:
    drive, number, places = claimed(source, 60)
    payloads = [{"n": 1}, "text", b"\x00\xff", None, 1.5]
    outgoing = [
        custody.Outgoing(
            payloads[n % 5], key=None if n % 3 == 0 else f"k{n}", headers={} if n % 4 else {"h": "ü", "n": str(n)}
        )
        for n in range(60)
    ]
    placed = stage(source, drive, number, [Output(p, 0, one) for p, one in zip(places, outgoing, strict=True)])
    work = BatchReport(placed=placed, ran=60)
    if cut:
        work.exact, work.failed = False, {places[7]: Outcome("nack", error="boom")}
        del outgoing[7]
    drive.commit(number, work)
    assert [(m.payload, m.key, dict(m.headers)) for m in source.read("out", 0, max_messages=100)] == [
        (one.payload, one.key, one.headers) for one in outgoing
    ]


def test_time_never_goes_back(source: custody.Custody, clock: Clock) -> None:
    drive, number, places = claimed(source, 100)
    placed = stage(source, drive, number, each(places))
    clock.move(10)
    last = [source.publish("out", {"of": [0, 0], "copy": 0}, partition=p) for p in (0, 1)]
    clock.move(-5)
    drive.commit(number, BatchReport(placed=placed, ran=100))
    assert [one.offset for one in last] == [0, 0]
    assert len(found(source)[0]) == 1 + len(told(each(places))[0])


def test_what_is_published_is_not_moved(source: custody.Custody, db: psycopg.Connection) -> None:
    source.publish_many("out", [custody.Outgoing(n, partition=0) for n in range(20)])
    with pytest.raises(psycopg.Error, match="there is no partition -1"):
        db.execute(
            "SELECT custody.move_staged(jsonb_populate_record(h, '{\"partition\": -1}'), ARRAY[h.segment_id], "
            "ARRAY[19], ARRAY[20], NULL) FROM custody.heads h JOIN custody.topics t USING (topic_id) "
            "WHERE t.name = 'out' AND h.partition = 0"
        )
    assert [message.payload for message in source.read("out", 0)] == list(range(20))
