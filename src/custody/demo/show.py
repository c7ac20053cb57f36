"""Runs the demo: publishes, starts worker processes, kills one, and checks everything that it claims."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
from rich.console import Console

import custody
from custody.demo.stock import GROUP, POLICY, SCHEMA, TOPIC

WORKERS = 3
PATIENCE = 90.0
HELD = "SELECT worker, sum(messages) FROM custody.in_flight WHERE worker = ANY (%s) GROUP BY worker ORDER BY 2 DESC"
# what a worker's leases held when they expired, and how much of it nobody claimed again although its key is free
TAKEN_OVER = """
SELECT count(*), count(*) FILTER (WHERE NOT EXISTS (
           SELECT FROM custody.history h
           WHERE h.kind = 'claim' AND h.partition = l.partition AND h.entry > l.entry AND h.offsets @> l.o)
       AND NOT EXISTS (
           SELECT FROM custody.deliveries d JOIN custody.blocked_keys b USING (partition, key)
           WHERE d.partition = l.partition AND d.event_offset = l.o AND b.why = 'held'))
FROM (SELECT x.partition, o, max(x.entry) AS entry
      FROM custody.history x, unnest(custody.offsets_list(x.offsets)) o
      WHERE x.kind = 'expire' AND x.worker = %s GROUP BY x.partition, o) l
"""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is published: `skus` with `changes` each; every seventh ADD fails twice; some SKUs get a poison change."""

    skus: int = 250
    changes: int = 20
    poison: int = 5

    def messages(self) -> list[custody.Outgoing]:
        """ADD 100 comes first for each SKU, then REMOVE 5 again and again; the SKUs are mixed."""
        return [
            custody.Outgoing(self._change(sku, number), key=f"SKU-{sku}")
            for number in range(self.changes)
            for sku in range(self.skus)
        ]

    def _change(self, sku: int, number: int) -> dict[str, Any]:
        change: dict[str, Any] = {"sku": f"SKU-{sku}", "number": number, "by": 100 if number == 0 else -5}
        if sku % 7 == 0 and number % 5 == 0:
            change["fails"] = 2
        if sku < self.poison and number == self.changes // 2:
            change["by"] = "many"
        return change

    @property
    def published(self) -> int:
        return self.skus * self.changes

    @property
    def behind_poison(self) -> int:
        return self.poison * (self.changes - self.changes // 2 - 1)

    def quantity(self, sku: int) -> int:
        applied = self.changes // 2 if sku < self.poison else self.changes
        return 100 - 5 * (applied - 1)


@dataclass(frozen=True, kw_only=True)
class Check:
    what: str
    good: bool
    found: str


def run(console: Console, plan: Plan | None = None, *, home: Path | None = None) -> list[Check]:
    """The whole demo, and what was checked. Leaves nothing behind unless `home` is given."""
    plan = plan or Plan()
    directory = home or Path(tempfile.mkdtemp(prefix="custody-demo-"))
    directory.chmod(0o711)  # as root the server runs as another user, who has to pass through
    try:
        with custody.connect(home=directory / "home", worker="operator") as c:
            return _show(console, c, plan)
    finally:
        if home is None:
            shutil.rmtree(directory, ignore_errors=True)


def _show(console: Console, c: custody.Custody, plan: Plan) -> list[Check]:
    with psycopg.connect(c.database_url, autocommit=True) as connection:
        connection.execute(SCHEMA)
    c.create_topic(TOPIC, partitions=2)
    c.create_group(TOPIC, GROUP, POLICY)
    c.publish_many(TOPIC, plan.messages())
    console.print(
        f"[bold]{plan.published:,}[/] changes of {plan.skus} SKUs are in the log: ADD 100, then REMOVE 5, many times. "
        f"Every seventh SKU times out twice now and then, {plan.poison} SKUs get a poison change, and the table "
        f"downstream has CHECK (quantity >= 0). {WORKERS} worker processes start; one of them will be killed with -9.\n"
    )
    zombie = c.claim(TOPIC, GROUP, max_messages=10, visibility_timeout="1s")
    workers = [
        subprocess.Popen([sys.executable, "-m", "custody.demo.stock", c.database_url], stderr=subprocess.DEVNULL)
        for _ in range(WORKERS)
    ]
    started = time.monotonic()
    try:
        killed = _watch(console, c, plan, workers, started)
    finally:
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.wait(30)
    took = time.monotonic() - started
    try:
        zombie.ack()
        late = "accepted"
    except custody.LeaseLost:
        late = "refused: lease_lost"
    checks = _checks(c, plan, killed, late)
    _story(console, c)
    console.print(f"\n[bold]Verdict[/] after {took:.1f} s")
    for check in checks:
        console.print(f"  {'[green]✓' if check.good else '[red]✗'}[/] {check.what}: {check.found}")
    return checks


def _watch(
    console: Console, c: custody.Custody, plan: Plan, workers: list[subprocess.Popen[bytes]], started: float
) -> str | None:
    """Shows the figures until nothing more can happen by itself; kills one worker on the way and returns its name."""
    killed: str | None = None
    shown = 0.0
    status = console.status("starting …") if console.is_terminal else None
    with status or nullcontext():
        while True:
            stats = c.stats(TOPIC, GROUP)
            resolved = plan.published - stats.depth
            line = (
                f"{resolved:6,} of {plan.published:,} resolved · {stats.in_flight:3} in flight · "
                f"{stats.waiting:3} to be retried · {stats.parked:3} behind their key · {stats.dead} dead"
                f"{' · one worker killed with -9' if killed else ''}"
            )
            if status is not None:
                status.update(line)
            elif time.monotonic() - shown > 1:
                console.print(line)
                shown = time.monotonic()
            if killed is None and resolved > plan.published * 0.2:
                killed = _kill_a_holder(c, workers)
            finished = stats.depth == plan.poison + plan.behind_poison and stats.dead == plan.poison
            if finished or time.monotonic() - started > PATIENCE:
                console.print(line)
                return killed
            time.sleep(0.1 if killed else 0.01)


def _kill_a_holder(c: custody.Custody, workers: list[subprocess.Popen[bytes]]) -> str | None:
    """Kills the worker that holds most messages, if any does: stopped first, so that it holds them when it dies."""
    names = {f"{socket.gethostname()}:{worker.pid}": worker for worker in workers}
    with psycopg.connect(c.database_url, autocommit=True) as connection:
        holders = connection.execute(HELD, [list(names)]).fetchall()
        if not holders:
            return None
        name = str(holders[0][0])
        names[name].send_signal(signal.SIGSTOP)
        try:
            time.sleep(0.05)  # what it has sent already is done by then
            if not connection.execute(HELD, [[name]]).fetchall():
                return None
            names[name].send_signal(signal.SIGKILL)
            return name
        finally:
            names[name].send_signal(signal.SIGCONT)


def _checks(c: custody.Custody, plan: Plan, killed: str | None, late: str) -> list[Check]:
    stats = c.stats(TOPIC, GROUP)
    with psycopg.connect(c.database_url, autocommit=True) as connection:

        def count(query: str, *values: object) -> int:
            row = connection.execute(query.encode(), values).fetchone()
            assert row is not None
            return int(row[0])

        done = count("SELECT count(*) FROM demo_applied")
        wrong = sum(
            count("SELECT count(*) FROM demo_stock WHERE sku = %s AND quantity = %s", f"SKU-{n}", plan.quantity(n)) != 1
            for n in range(plan.skus)
        )
        overtaken = count(
            "SELECT count(*) FROM (SELECT number, lag(number, 1, -1) OVER (PARTITION BY sku ORDER BY entry) AS before "
            "FROM demo_applied) x WHERE number <> before + 1"
        )
        rejected = count("SELECT count(*) FROM demo_rejected")
        left, lost = connection.execute(TAKEN_OVER, [killed]).fetchall()[0]
    held = stats.parked
    total = done + stats.dead + held
    return [
        Check(
            what="nothing is lost or done twice",
            good=total == plan.published and stats.dead == plan.poison and held == plan.behind_poison,
            found=f"{done:,} done + {stats.dead} dead + {held} held behind them = {total:,} published",
        ),
        Check(what="every SKU has the right stock", good=wrong == 0, found=f"{plan.skus - wrong} of {plan.skus}"),
        Check(what="the order of every key was kept", good=overtaken == 0, found=f"{overtaken} overtaken"),
        Check(what="CHECK (quantity >= 0) was never violated", good=rejected == 0, found=f"{rejected} writes rejected"),
        Check(
            what="the killed worker's messages were taken over",
            good=left > 0 and lost == 0,
            found=f"{left - lost} of the {left} that it left",
        ),
        Check(what="a late ack was refused", good=late.startswith("refused"), found=late),
    ]


def _story(console: Console, c: custody.Custody) -> None:
    """What happened to one message that failed and was held."""
    letters = c.dead(TOPIC, GROUP, limit=1)
    if not letters:
        return
    letter = letters[0]
    where = f"{letter.topic}/{letter.partition}/{letter.offset}"
    console.print(f"\n[bold]The story of {where}[/] (key {letter.key}, {letter.payload})")
    console.print(f"  {letter.published_at:%H:%M:%S.%f}  published")
    for entry in c.trace(letter.topic, letter.partition, letter.offset, group=GROUP):
        attempt = f", attempt {entry.attempt}" if entry.attempt else ""
        error = f": {entry.error}" if entry.error else ""
        console.print(f"  {entry.at:%H:%M:%S.%f}  {entry.kind}{attempt}{error}")
    console.print(f"  its key waits for an operator: c.release_key({letter.topic!r}, {GROUP!r}, {letter.key!r})")
