"""A batch query on dead letters: what fails most, and why, as a DataFrame."""

from __future__ import annotations

from pyspark.sql import functions as F

import custody
from custody.spark.session import session


def main() -> None:
    spark = session()
    with custody.connect() as c:
        if "mails" not in {topic.name for topic in c.topics()}:
            c.create_topic("mails")
            c.create_group("mails", "sender", custody.Policy(max_attempts=1))
        for number in range(30):
            c.publish("mails", {"to": f"user-{number}@{('a', 'b')[number % 2]}.example"})
        lease = c.claim("mails", "sender", max_messages=30)
        for message in lease:
            domain = message.payload["to"].partition("@")[2]
            if message.offset % 3:
                lease.ack(message)
            else:
                lease.nack(message, error=f"{domain}: mailbox full")
        letters = (
            spark.read.format("custody")
            .option("url", c.database_url)
            .option("table", "dead_letters")
            .option("topic", "mails")
            .load()
        )
        worst = letters.groupBy("last_error").agg(F.count("*").alias("letters"), F.max("died_at").alias("latest"))
        for row in worst.orderBy(F.desc("letters"), "last_error").collect():
            print(f"{row['letters']} × {row['last_error']}, last at {row['latest']:%H:%M}")


if __name__ == "__main__":
    main()
