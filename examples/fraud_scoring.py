"""Scores payments for fraud, thousands in a call: vectorised with Arrow, yet each payment has an outcome of its own.

python examples/fraud_scoring.py                  publishes some payments, scores them, and says what came of it
python examples/fraud_scoring.py publish 200000   only publishes
custody pipeline run examples/fraud_scoring.py    scores what is published, until it is stopped
"""

from __future__ import annotations

import sys

import pyarrow as pa
import pyarrow.compute as pc

import custody
from custody.spark import Pipeline, expect, fail

pipeline = Pipeline(
    source="card-payments",
    group="fraud-scoring",
    sink=["card-payments-scored", "card-payments-blocked"],
    policy=custody.Policy(ordering="key", max_attempts=3, backoff=custody.Constant("100ms")),
    schema="number int, account string, amount double, country string",
)
RISKY = pa.array(["XX", "YY"])


@pipeline.batch
def score(payments: pa.RecordBatch) -> pa.RecordBatch:
    """Runs on thousands of payments at once. A payment that is marked fails alone."""
    amount, risky = payments.column("amount"), pc.is_in(payments.column("country"), RISKY)
    risk = pc.if_else(risky, 0.9, pc.min_element_wise(pc.divide(amount, 10_000), 0.5))
    blocked = pc.greater(risk, 0.8)
    scored = payments.append_column("risk", pc.round(risk, 3)).append_column("blocked", blocked)
    scored = scored.append_column("_topic", pc.if_else(blocked, "card-payments-blocked", "card-payments-scored"))
    scored = expect("an amount above zero", pc.greater(amount, 0))(scored)
    unknown = pc.and_(pc.greater(amount, 9_000), pc.equal(payments.column("_attempt"), 1))
    return fail(scored, unknown, "the register of large payments did not answer")


def publish(c: custody.Custody, count: int) -> None:
    """Payments of 1,000 accounts; one of a hundred cannot be scored, whoever tries."""
    known = {topic.name for topic in c.topics()}
    for name in {"card-payments", "card-payments-scored", "card-payments-blocked"} - known:
        c.create_topic(name, partitions=4)
    for first in range(0, count, 10_000):
        c.publish_many("card-payments", [_payment(number) for number in range(first, min(count, first + 10_000))])


def _payment(number: int) -> custody.Outgoing:
    account = f"ACC-{number % 1000}"
    amount = -1.0 if number % 100 == 99 else 10.0 + number % 9_100
    country = "XX" if number % 250 == 0 else "SE"
    return custody.Outgoing({"number": number, "account": account, "amount": amount, "country": country}, key=account)


def main() -> None:
    count = int(sys.argv[2]) if sys.argv[1:2] == ["publish"] else 2_000
    with custody.connect() as c:
        publish(c, count)
        if sys.argv[1:2] == ["publish"]:
            return
        summary = pipeline.run(c, drain="30s")
        blocked = sum(len(c.read("card-payments-blocked", partition)) for partition in range(4))
        letter = c.dead("card-payments", "fraud-scoring", limit=1)[0]
        print(f"{summary.done} scored, {summary.dead} dead, {blocked} blocked")
        print(f"the first dead one: {letter.payload}, because {letter.last_error}")


if __name__ == "__main__":
    main()
