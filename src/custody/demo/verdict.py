"""The checks of the result of the demo on Spark, by queries of the database."""

from __future__ import annotations

from dataclasses import dataclass

import psycopg

import custody
from custody.demo.check import Check
from custody.demo.plan import Plan
from custody.demo.stock import BOOKS, LEDGER, LEVELS
from custody.demo.warehouse import CHANGES, OVERTAKEN, STOCK
from custody.spark.tasks.each import KILLED

# (sku, number) of every message of a topic, in the order of its log
_NUMBERED = """
SELECT payload::json ->> 'sku' AS sku, (payload::json ->> 'number')::int AS number, partition, "offset"
FROM custody.events WHERE topic = %s
"""
_TWICE = f"SELECT count(*) - count(DISTINCT (sku, number)) FROM ({_NUMBERED}) x"
_LATE = f"""
SELECT count(*) FROM (
    SELECT number, lag(number, 1, -1) OVER (PARTITION BY sku ORDER BY partition, "offset") AS before
    FROM ({_NUMBERED}) x) y
WHERE number <= before
"""
# the claim that the killed driver left, if a newer driver committed it
_TAKEN_OVER = """
SELECT b.messages - b.lost FROM custody.pipeline_batches b JOIN custody.groups g USING (group_id)
WHERE g.name = %s AND b.claim = %s AND b.epoch > %s
"""


@dataclass(frozen=True, kw_only=True)
class Killed:
    """The killed driver: its epoch, and the claim that it left."""

    epoch: int
    claim: int
    messages: int


def checks(c: custody.Custody, plan: Plan, killed: Killed | None) -> list[Check]:
    stats, books = c.stats(CHANGES, STOCK), c.stats(LEVELS, BOOKS)
    letters, wrong_casts = c.dead(CHANGES, STOCK), c.dead(LEVELS, BOOKS)
    with psycopg.connect(c.database_url, autocommit=True) as connection:

        def count(query: str, *values: object) -> int:
            row = connection.execute(query.encode(), values).fetchone()
            return 0 if row is None else int(row[0])

        done = count("SELECT count(*) FROM demo_applied")
        wrong = sum(
            count("SELECT count(*) FROM demo_stock WHERE sku = %s AND quantity = %s", f"SKU-{n}", plan.quantity(n)) != 1
            for n in range(plan.skus)
        )
        overtaken = count(OVERTAKEN)
        rejected = count("SELECT count(*) FROM demo_rejected")
        twice, late = count(_TWICE, LEVELS), count(_LATE, LEVELS) + count(_LATE, LEDGER)
        finished = 0 if killed is None else count(_TAKEN_OVER, STOCK, killed.claim, killed.epoch)
    passed_on, booked = c.topic(LEVELS).message_count, c.topic(LEDGER).message_count
    total = done + stats.dead + stats.parked
    enders = [letter for letter in letters if letter.last_error == KILLED]
    return [
        Check(
            what="nothing is lost or done twice",
            good=(total, done, stats.dead, stats.parked) == (plan.published, plan.done, plan.dead, plan.behind_dead),
            found=f"{done:,} done + {stats.dead} dead + {stats.parked} held behind them = {total:,} published",
        ),
        Check(
            what="the topic downstream has each done change once",
            good=passed_on == done and twice == 0,
            found=f"{passed_on:,} messages, {twice} twice",
        ),
        Check(what="every SKU has the right stock", good=wrong == 0, found=f"{plan.skus - wrong} of {plan.skus}"),
        Check(
            what="the order of every key was kept",
            good=overtaken + late == 0,
            found=f"{overtaken} overtaken in the table, {late} in the topics downstream",
        ),
        Check(what="CHECK (quantity >= 0) was never violated", good=rejected == 0, found=f"{rejected} writes rejected"),
        Check(
            what="the next driver finished the claim of the killed one",
            good=killed is not None and finished > 0,
            found="no driver was killed" if killed is None else f"claim {killed.claim}, {finished:,} messages",
        ),
        Check(
            what="the change that ended its Python process is dead, and no other because of it",
            good=[letter.key for letter in enders] == [f"SKU-{plan.poison}"],
            found=", ".join(f"{letter.key}: {letter.last_error}" for letter in enders) or "none",
        ),
        Check(
            what="the row that broke a cast is dead, and the rest of its batch went on",
            good=[letter.key for letter in wrong_casts] == [f"SKU-{plan.poison + 1}"]
            and booked == passed_on - 1
            and books.depth == 0,
            found=", ".join(f"{letter.key}: {(letter.last_error or '')[:60]}…" for letter in wrong_casts) or "none",
        ),
    ]
