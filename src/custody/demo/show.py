"""Runs the demo on Spark: publishes, starts a driver, kills it halfway, starts another, and checks the result."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext, suppress
from pathlib import Path

import psycopg
from rich.console import Console

import custody
from custody.demo import check
from custody.demo.check import Check
from custody.demo.plan import Plan
from custody.demo.stage import Stage, kill, stage
from custody.demo.stock import BOOKS, LEDGER, LEVELS, pipelines
from custody.demo.verdict import Killed, checks
from custody.demo.warehouse import CHANGES, SCHEMA, STOCK
from custody.errors import PipelineFailed
from custody.spark.running import prepare

PATIENCE = 180.0
"""The demo gives up when nothing was processed for so many seconds. A slow machine may take as long as it needs."""
LOG = "driver.log"
JVM = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:-UsePerfData"
"""A driver of the demo lives for seconds, so its JVM compiles quickly rather than well, and leaves no file behind."""
LOOK = 0.25
"""Seconds between two looks at the figures, which take time from the pipelines."""
_IN_FLIGHT = """
SELECT epoch, claim, messages FROM custody.pipeline_state WHERE consumer_group = %s AND claim IS NOT NULL
"""


def run(console: Console, plan: Plan | None = None, *, home: Path | None = None) -> list[Check]:
    """Runs the whole demo and returns its checks. Leaves nothing behind unless `home` is given."""
    with stage(home) as on:
        return _show(console, on, plan or Plan())


def publish(c: custody.Custody, plan: Plan) -> None:
    """Creates the tables, topics and groups, and publishes the changes."""
    with psycopg.connect(c.database_url, autocommit=True) as connection:
        connection.execute(SCHEMA)
    for topic in (CHANGES, LEVELS, LEDGER):
        c.create_topic(topic, partitions=2)
    for pipeline in pipelines(c.database_url):
        prepare(pipeline, c)
    c.publish_many(CHANGES, plan.messages())


def _show(console: Console, on: Stage, plan: Plan) -> list[Check]:
    started = time.monotonic()
    first = _driver(on)  # Spark starts while the database does
    c = on.c
    publish(c, plan)
    console.print(
        f"[bold]{plan.published:,}[/] changes of {plan.skus} SKUs are in the log: ADD 100, then REMOVE 1, many times. "
        "Two pipelines on Spark process them: the first applies each change to a table with CHECK (quantity >= 0) and "
        "publishes it, the second books what the first published. Some changes of every seventh SKU time out twice, "
        f"{plan.poison} SKUs get a poison change, one change ends its Python process, one breaks a cast, and the "
        "driver is killed with -9 halfway. A second driver has started Spark by then, and waits.\n"
    )
    _run(on, first)
    second = _driver(on)
    killed = _watch(console, on, plan, first, then_kill=True)
    _run(on, second)
    _watch(console, on, plan, second, then_kill=False)
    second.terminate()
    found = checks(c, plan, killed)
    _story(console, c)
    check.show(console, found, time.monotonic() - started)
    second.wait(60)
    return found


def _driver(on: Stage) -> subprocess.Popen[bytes]:
    """Starts a driver, which starts its JVM and waits. Its temporary files are on the stage, because it is killed."""
    files = on.directory / "files"
    files.mkdir(exist_ok=True)
    options = f"{JVM} -Djava.io.tmpdir={files}"
    return on.start(
        [sys.executable, "-c", "from custody.demo.stock import main; main()"],
        LOG,
        {"SPARK_SUBMIT_OPTS": options, "SPARK_LAUNCHER_OPTS": options, "SPARK_LOCAL_DIRS": str(files),
         "TMPDIR": str(files)},
    )  # fmt: skip


def _run(on: Stage, driver: subprocess.Popen[bytes]) -> None:
    """Lets a driver run the pipelines."""
    assert driver.stdin is not None
    try:
        driver.stdin.write(f"{on.c.database_url}\n".encode())
        driver.stdin.flush()
    except BrokenPipeError:
        raise _ended(on) from None


def _ended(on: Stage) -> PipelineFailed:
    return PipelineFailed(
        f"the driver has ended unexpectedly: {on.last_words(LOG)}", "CUSTODY_SPARK_LOG=info shows more."
    )


def _held(
    driver: subprocess.Popen[bytes], connection: psycopg.Connection[tuple[int, int, int]], claim: tuple[int, int, int]
) -> bool:
    """Suspends the driver. True if it still has that claim, so that it can be killed with it; else it is resumed."""
    with suppress(ProcessLookupError):
        os.killpg(driver.pid, signal.SIGSTOP)
    time.sleep(0.3)  # a commit that was sent has finished by then
    if connection.execute(_IN_FLIGHT, [STOCK]).fetchone() == claim:
        return True
    with suppress(ProcessLookupError):
        os.killpg(driver.pid, signal.SIGCONT)
    return False


def _watch(
    console: Console, on: Stage, plan: Plan, driver: subprocess.Popen[bytes], *, then_kill: bool
) -> Killed | None:
    """Shows the figures until nothing is left to do, or until a third is done and a claim is in flight."""
    c = on.c
    shown, last = 0.0, ""
    changed, before = time.monotonic(), ""
    first = "Starting Spark …" if then_kill else "The second driver takes over …"
    status = console.status(first) if console.is_terminal else None
    if status is None:
        console.print(first)
    with status or nullcontext(), psycopg.connect(c.database_url, autocommit=True) as connection:
        while True:
            stock, books = c.figures(CHANGES, STOCK), c.figures(LEVELS, BOOKS)
            resolved = plan.published - stock.lag - stock.in_flight - stock.waiting - stock.parked
            line = (
                f"{resolved:6,} of {plan.published:,} resolved · {stock.in_flight:5,} in flight · "
                f"{stock.waiting:3} to retry · {stock.parked:4,} behind their key · {stock.dead} dead · "
                f"{c.topic(LEDGER).message_count:6,} booked"
            )
            if status is not None:
                status.update(line)
            elif line != last and time.monotonic() - shown > 2:
                console.print(line)
                shown, last = time.monotonic(), line
            claim = connection.execute(_IN_FLIGHT, [STOCK]).fetchone()
            if then_kill and claim is not None and resolved > plan.published / 3 and _held(driver, connection, claim):
                kill(driver)
                console.print(f"{line}\n[bold]The driver is killed with -9[/]; claim {claim[1]} was in flight.")
                return Killed(epoch=claim[0], claim=claim[1], messages=claim[2])
            finished = (
                (stock.lag, stock.in_flight, stock.waiting, stock.dead) == (0, 0, 0, plan.dead)
                and stock.parked == plan.behind_dead
                and (books.lag, books.in_flight, books.waiting, books.parked) == (0, 0, 0, 0)
            )
            if driver.poll() is not None:
                raise _ended(on)
            if finished:
                console.print(line)
                return None
            if line != before:
                changed, before = time.monotonic(), line
            elif time.monotonic() - changed > PATIENCE:
                raise PipelineFailed(
                    f"nothing was processed for {PATIENCE:.0f} s, and the demo is not finished: {line.strip()}",
                    f"The driver said last: {on.last_words(LOG)}. CUSTODY_SPARK_LOG=info shows more.",
                )
            time.sleep(LOOK)


def _story(console: Console, c: custody.Custody) -> None:
    """Prints the history of one message that failed and is held."""
    letters = [letter for letter in c.dead(CHANGES, STOCK) if "number of units" in (letter.last_error or "")]
    if not letters:
        return
    letter = letters[0]
    where = f"{letter.topic}/{letter.partition}/{letter.offset}"
    console.print(f"\n[bold]History of {where}[/] (key {letter.key}, {letter.payload})")
    console.print(f"  {letter.published_at:%H:%M:%S.%f}  published")
    for entry in c.trace(letter.topic, letter.partition, letter.offset, group=STOCK):
        if entry.kind == "extend":
            continue
        attempt = f", attempt {entry.attempt}" if entry.attempt else ""
        error = f": {entry.error}" if entry.error else ""
        console.print(f"  {entry.at:%H:%M:%S.%f}  {entry.kind}{attempt}{error}")
    console.print(
        f"  its key is held until an operator calls c.release_key({letter.topic!r}, {STOCK!r}, {letter.key!r})"
    )
