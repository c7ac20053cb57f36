"""Runs the demo without Spark: two worker processes, one killed halfway; a fix and a redrive; then the checks.

`work` runs in a worker's process.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

import psycopg
from rich.console import Console

import custody
from custody.demo import check
from custody.demo.check import Check
from custody.demo.plan import Plan
from custody.demo.stage import Stage, end_with_the_demo, kill, stage
from custody.demo.warehouse import CHANGES, OVERTAKEN, SCHEMA, STOCK, applying
from custody.errors import Stalled

PLAN = Plan(skus=60, changes=20, poison=3, kills=False)
FAILED = "%is not a number of units%"
POLICY = custody.Policy(
    ordering="key",
    max_attempts=3,
    backoff=custody.Exponential("50ms", cap="500ms"),
    visibility_timeout="2s",
    on_dead="hold",
)
MOST = 40
"""Messages of one lease: a killed worker leaves a few dozen."""
PATIENCE = 60.0
"""The demo gives up when nothing was processed for so many seconds."""
LOOK = 0.1
_LEASED = """
SELECT DISTINCT l.partition, o."offset" FROM custody.leases l
CROSS JOIN LATERAL unnest(l.held) r CROSS JOIN LATERAL generate_series(lower(r), upper(r) - 1) o("offset")
WHERE l.worker = %s ORDER BY 1, 2
"""


@dataclass(frozen=True, kw_only=True)
class Killed:
    """A worker that was killed, and the messages under its leases."""

    worker: str
    messages: tuple[tuple[int, int], ...]


def run(console: Console, plan: Plan = PLAN, *, home: Path | None = None, serve: bool = False) -> list[Check]:
    """Runs the whole demo and returns its checks. Leaves nothing behind unless `home` is given.

    With `serve` the dashboard shows its data afterwards, until Ctrl-C or SIGTERM.
    """
    started = time.monotonic()
    status = console.status("Starting PostgreSQL …") if console.is_terminal else nullcontext()
    with status, stage(home) as on:
        publish(on.c, plan)
        if not console.is_terminal:
            console.print("PostgreSQL has started.")
        found = _show(console, on, plan)
        check.show(console, found, time.monotonic() - started)
        if serve:
            _serve(console, on.c)
        return found


def _serve(console: Console, c: custody.Custody) -> None:
    from custody.http import ServerSettings
    from custody.http import serve as run_server

    settings = ServerSettings(port=0, connections=4)
    run_server(c, settings, ready=lambda url: console.print(f"\nThe dashboard is at {url}/ui; Ctrl-C ends the demo"))


def publish(c: custody.Custody, plan: Plan) -> None:
    """Creates the tables, the topic and the group, and publishes the changes."""
    with psycopg.connect(c.database_url, autocommit=True) as connection:
        connection.execute(SCHEMA)
    c.create_topic(CHANGES, partitions=2)
    c.create_group(CHANGES, STOCK, POLICY)
    c.publish_many(CHANGES, plan.messages())


def _show(console: Console, on: Stage, plan: Plan) -> list[Check]:
    c = on.c
    console.print(
        f"[bold]{plan.published:,}[/] changes of {plan.skus} SKUs are in the log: ADD 100, then REMOVE 1, many times. "
        "Two worker processes apply them to a table with CHECK (quantity >= 0). Some changes of every seventh SKU time "
        f"out twice, {plan.poison} SKUs get a poison change, and one worker is killed with -9 on the way.\n"
    )
    workers = {name: _worker(on, name) for name in ("worker-1", "worker-2")}
    _wait(on, plan, workers, lambda stock: _resolved(plan, stock) > plan.published // 4)
    killed = _kill_one(on, workers)
    console.print(
        f"[bold]{killed.worker} is killed with -9[/]; {len(killed.messages)} messages were in flight. "
        "The other worker gets them when their leases expire, after two seconds."
    )
    _wait(on, plan, workers, lambda stock: _settled(stock) and stock.parked == plan.behind_dead)
    before = c.stats(CHANGES, STOCK)
    letters = c.dead(CHANGES, STOCK)
    console.print(f"\n[bold]custody dead {CHANGES} {STOCK}[/]: {before.parked} later messages of their keys wait")
    for letter in letters:
        where = f"{letter.topic}/{letter.partition}/{letter.offset}"
        console.print(f"  {where}  {letter.key}  {letter.attempts} attempts  {letter.last_error}")
    (left,) = workers
    workers.pop(left).terminate()
    workers["worker-3"] = _worker(on, "worker-3", fixed=True)
    redriven = c.redrive(CHANGES, STOCK, where_error=FAILED, reason="the handler reads units now")
    console.print(
        "\nA worker with the fix starts. "
        f"[bold]custody redrive {CHANGES} {STOCK} --where-error '{FAILED}'[/]: {len(redriven)} redriven"
    )
    _wait(on, plan, workers, lambda stock: _settled(stock) and stock.depth == 0)
    return checks(c, plan, killed, letters, before.parked)


def _worker(on: Stage, name: str, *, fixed: bool = False) -> subprocess.Popen[bytes]:
    program = "from custody.demo.quick import work; work()"
    return on.start([sys.executable, "-c", program, on.c.database_url, name, str(int(fixed))], f"{name}.log", {})


def work() -> None:
    """What a worker process does until SIGTERM, or until the demo is gone, however that ended."""
    from custody.worker.signals import stopped_by_signals

    url, name, fixed = sys.argv[1:]
    end_with_the_demo()
    with custody.connect(url, worker=name) as c:
        handler = applying(url, fixed=fixed == "1")
        worker = c.worker_for(CHANGES, STOCK, handler, max_messages=MOST, poll="100ms")
        with stopped_by_signals(worker.stop):
            worker.run()


def _resolved(plan: Plan, stock: custody.Stats) -> int:
    return plan.published - stock.depth


def _settled(stock: custody.Stats) -> bool:
    """Nothing will happen by itself any more."""
    return (stock.lag, stock.in_flight, stock.waiting) == (0, 0, 0)


def _wait(
    on: Stage, plan: Plan, workers: dict[str, subprocess.Popen[bytes]], reached: Callable[[custody.Stats], bool]
) -> None:
    """Waits until the figures are as wanted. Fails if a worker ends, or if nothing changes for long."""
    changed, before = time.monotonic(), -1
    while not reached(stock := on.c.stats(CHANGES, STOCK)):
        for name, worker in workers.items():
            if worker.poll() is not None:
                raise Stalled(f"{name} has ended unexpectedly: {on.last_words(f'{name}.log')}")
        if (now := _resolved(plan, stock)) != before:
            changed, before = time.monotonic(), now
        elif time.monotonic() - changed > PATIENCE:
            words = "; ".join(f"{name}: {on.last_words(f'{name}.log')}" for name in workers)
            raise Stalled(f"nothing was processed for {PATIENCE:.0f} s, and the demo is not finished. {words}")
        time.sleep(LOOK)


def _kill_one(on: Stage, workers: dict[str, subprocess.Popen[bytes]]) -> Killed:
    """Kills the first worker that has messages in flight. It is suspended while that is found out."""
    with psycopg.connect(on.c.database_url, autocommit=True) as connection:
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            for name, worker in workers.items():
                with suppress(ProcessLookupError):
                    os.killpg(worker.pid, signal.SIGSTOP)
                time.sleep(0.1)  # what it has sent has finished by then, if the machine is not busy
                held = connection.execute(_LEASED, [name]).fetchall()
                time.sleep(0.2)
                if held and held == connection.execute(_LEASED, [name]).fetchall():
                    kill(worker)
                    del workers[name]
                    return Killed(worker=name, messages=tuple(held))
                with suppress(ProcessLookupError):
                    os.killpg(worker.pid, signal.SIGCONT)
                time.sleep(0.05)
    raise Stalled("no worker had messages in flight")


def checks(
    c: custody.Custody, plan: Plan, killed: Killed, letters: list[custody.DeadLetter], waited: int
) -> list[Check]:
    """The checks of the result: `letters` were dead, and `waited` messages were behind them, before the fix."""
    with psycopg.connect(c.database_url, autocommit=True) as connection:

        def count(query: str, *values: object) -> int:
            row = connection.execute(query.encode(), values).fetchone()
            return 0 if row is None else int(row[0])

        done, rejected = count("SELECT count(*) FROM demo_applied"), count("SELECT count(*) FROM demo_rejected")
        right = sum(
            count(
                "SELECT count(*) FROM demo_stock WHERE sku = %s AND quantity = %s",
                f"SKU-{sku}",
                plan.quantity(sku, repaired=True),
            )
            for sku in range(plan.skus)
        )
        overtaken = count(OVERTAKEN)
    stats = c.stats(CHANGES, STOCK)
    histories = [c.trace(CHANGES, *place, group=STOCK) for place in killed.messages]
    # the acks of the killed one that were on their way have counted
    left = [each for each in histories if not any((one.kind, one.worker) == ("ack", killed.worker) for one in each)]
    redelivered = sum(any(one.kind == "claim" and one.worker != killed.worker for one in each) for each in left)
    return [
        Check(
            what="nothing is lost or done twice",
            good=(done, stats.depth, stats.dead) == (plan.published, 0, 0),
            found=f"{done:,} of {plan.published:,} published changes are applied, {stats.depth} are left",
        ),
        Check(what="every SKU has the right stock", good=right == plan.skus, found=f"{right} of {plan.skus}"),
        Check(what="the order of every key was kept", good=overtaken == 0, found=f"{overtaken} overtaken"),
        Check(what="CHECK (quantity >= 0) was never violated", good=rejected == 0, found=f"{rejected} writes rejected"),
        Check(
            what="other workers got every message of the killed one",
            good=redelivered == len(left) > 0,
            found=f"{redelivered} of {len(left)}",
        ),
        Check(
            what="a poison message died after its attempts, held its own key, and succeeded after the fix",
            good=[(letter.key, letter.attempts) for letter in sorted(letters, key=lambda one: str(one.key))]
            == [(f"SKU-{sku}", POLICY.max_attempts) for sku in range(plan.poison)]
            and waited == plan.behind_dead,
            found=f"{len(letters)} redriven, {waited} messages behind them",
        ),
    ]
