"""Visits of a shop, made of clicks: a state for each visitor, which contains every click exactly once.

A visit ends with half an hour without a click. It comes out with the next click of the same visitor. Clicks arrive
twice now and then, so another keyed pipeline drops the duplicates first.
"""

from __future__ import annotations

import custody
from custody.spark import Pipeline
from custody.spark.keyed import dedup, session

POLICY = custody.Policy(ordering="key", max_attempts=3, backoff=custody.Constant("100ms"))
PAGES = ("/", "/tea", "/cups", "/basket")

once = Pipeline(source="clicks", group="once", sink="clicks-once", policy=POLICY)
once.keyed(dedup(by="id", within="1d"))

visits = Pipeline(source="clicks-once", group="visits", sink="visits", policy=POLICY)
visits.keyed(session(gap="30m", on="at", aggregate={"clicks": "count", "pages": "list(page)"}))


def main() -> None:
    with custody.connect() as c:
        known = {topic.name for topic in c.topics()}
        for name in {"clicks", "clicks-once", "visits"} - known:
            c.create_topic(name, partitions=2)
        for visit in range(3):
            for number, page in enumerate(PAGES):
                for visitor in range(10):
                    at = 1_800_000_000 + visit * 7200 + number * 60 + visitor
                    click = {"id": f"{visit}-{number}", "at": at, "page": page}
                    for _ in range(2 if visitor == number else 1):  # some are sent twice
                        c.publish("clicks", click, key=f"V-{visitor}")
        first = once.run(c, drain="30s")
        second = visits.run(c, drain="30s")
        print(f"{first.done} clicks, {first.skipped} duplicates, {second.outputs} visits")
        open_visits = c.key_states("clicks-once", "visits")
        print(f"{len(open_visits)} visitors have an open visit")


if __name__ == "__main__":
    main()
