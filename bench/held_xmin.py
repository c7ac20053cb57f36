"""Claim and ack, round after round, while a transaction elsewhere holds back the removal of dead rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

from bench.backlog import fill
from bench.measure import Samples, ratio
from bench.report import Row, at_least
from bench.stage import Stage, plain
from custody import Policy

SIZE = 10


def rows(stage: Stage) -> Iterator[Row]:
    rounds = stage.sizes.held_rounds
    started, ended, undisturbed = Samples(), Samples(), Samples()
    for _ in range(stage.sizes.held_repetitions):
        undisturbed.values.append(tenths(stage, rounds, held=False)[-1])
        rates = tenths(stage, rounds, held=True)
        started.values.append(rates[0])
        ended.values.append(rates[-1])
    yield Row(
        what=f"held xmin: last tenth of {rounds:,} rounds",
        measured=ended.median,
        unit="rounds/s",
        beside="the first tenth",
        other=started.median,
        ratio=ratio(ended, started),
        ratio_target=at_least(0.9),
    )
    yield Row(
        what="  against a run with nothing held",
        measured=ended.median,
        unit="rounds/s",
        beside="nothing held",
        other=undisturbed.median,
        ratio=ratio(ended, undisturbed),
        ratio_target=at_least(0.9),
    )


def tenths(stage: Stage, rounds: int, *, held: bool) -> list[float]:
    """Rounds a second, in each tenth of the rounds."""
    warm = rounds // 20
    with stage.open() as (c, connection):
        fill(c, connection, "orders", SIZE * (rounds + warm))
        c.create_group("orders", "workers", Policy(ordering="key"))

        def run(count: int) -> float:
            start = perf_counter()
            for _ in range(count):
                c.claim("orders", "workers", max_messages=SIZE).ack()
            return count / (perf_counter() - start)

        run(warm)
        with holding(c.database_url, held):
            return [run(rounds // 10) for _ in range(10)]


@contextmanager
def holding(url: str, held: bool) -> Iterator[None]:
    """A transaction with a snapshot and a transaction id, idle until the end."""
    if not held:
        yield
        return
    with plain(url) as connection:
        connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        connection.execute("SELECT txid_current()")
        yield
        connection.execute("ROLLBACK")
