"""Screens payments for fraud, one by one, on Spark: an account's payments in order, bad ones dead, the rest flows.

python examples/fraud_screening.py                  publishes some payments, screens them, and says what came of it
python examples/fraud_screening.py publish 200000   only publishes
custody pipeline run examples/fraud_screening.py    screens what is published, until it is stopped
"""

from __future__ import annotations

import sys

import custody
from custody.spark import Pipeline

pipeline = Pipeline(
    source="payments",
    group="fraud-screening",
    sink="payments-screened",
    policy=custody.Policy(ordering="key", max_attempts=3, backoff=custody.Exponential("100ms")),
    schema="number int, account string, amount double, country string",
)
RISKY = {"XX", "YY"}


@pipeline.each
def screen(message: custody.Message) -> dict[str, object]:
    payment = message.payload
    if payment["amount"] is None or payment["amount"] <= 0:
        raise custody.Dead(f"an amount of {payment['amount']} is no payment")
    if payment["amount"] > 9_000 and message.attempt == 1:
        raise TimeoutError("the register of large payments did not answer")
    risk = 0.9 if payment["country"] in RISKY else min(payment["amount"] / 10_000, 0.5)
    return {**payment, "risk": round(risk, 3), "blocked": risk > 0.8}


def publish(c: custody.Custody, count: int) -> None:
    """Payments of 1,000 accounts; one of a hundred cannot be screened, whoever tries."""
    known = {topic.name for topic in c.topics()}
    for name in {"payments", "payments-screened"} - known:
        c.create_topic(name, partitions=4)
    for first in range(0, count, 10_000):
        c.publish_many("payments", [_payment(number) for number in range(first, min(count, first + 10_000))])


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
        letter = c.dead("payments", "fraud-screening", limit=1)[0]
        print(f"{summary.done} screened, {summary.dead} dead, {summary.outputs} published")
        print(f"the first dead one: {letter.payload}, because {letter.last_error}")


if __name__ == "__main__":
    main()
