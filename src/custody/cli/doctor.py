"""`custody doctor`: checks with remedies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import typer

from custody import extras
from custody.address import is_remote
from custody.cli import render
from custody.cli.failures import FAILED
from custody.cli.session import Session, counted, operator, session_of
from custody.errors import CustodyError, PermissionDenied, SchemaMismatch, SchemaMissing, SchemaNewer, SchemaOlder
from custody.model.plain import plain
from custody.spark.environment import java

if TYPE_CHECKING:
    from custody import Custody
    from custody.model.insights import HandlingTime, Server

OLDEST, NEWEST = 15, 18  # PostgreSQL versions that Custody is tested on
STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red", "info": "cyan"}


@dataclass(frozen=True, kw_only=True)
class Check:
    """One finding. Only `fail` makes the command fail."""

    name: str
    status: Literal["ok", "warn", "fail", "info"]
    message: str
    remedy: str = ""


def doctor(ctx: typer.Context) -> int | None:
    """Check the database, its settings and schema, Java, and whether visibility timeouts are long enough."""
    session = session_of(ctx)
    checks: list[Check] = []
    times: list[HandlingTime] = []
    c = _opened(session, checks)
    if c is not None:
        with c:
            try:
                server = c.server()
                times = c.handling_times()
            except PermissionDenied as error:
                remedy = "Run doctor as the owner of the schema, or in the role readonly (`custody grants`)."
                checks.append(Check(name="role", status="fail", message=error.message, remedy=remedy))
            else:
                checks += _server_checks(server)
                checks.append(_schema_check(session, server))
                checks += [check for time in times for check in _visibility_checks(time)]
    checks.append(Check(name="java", status="info", message=java.found()))
    checks.append(_extras_check())
    healthy = all(check.status != "fail" for check in checks)
    if session.json:
        groups = [{**plain(time), "recommended_visibility_timeout": time.recommended} for time in times]
        session.emit({"healthy": healthy, "checks": checks, "groups": groups})
    else:
        _print(session, checks, times)
    return None if healthy else FAILED


def _extras_check() -> Check:
    there = extras.installed()
    absent = [name for name, found in there.items() if not found]
    return Check(
        name="extras",
        status="info",
        message=", ".join(name for name, found in there.items() if found) or "none is installed",
        remedy=f"For more: pip install 'custody[{','.join(absent)}]'." if absent else "",
    )


def _opened(session: Session, checks: list[Check]) -> Custody | None:
    """Opens the database without creating or changing anything; None if that is impossible."""
    from custody.connection import connect_existing

    url = None
    try:
        url = session.configured_url
        c = connect_existing(session.database, home=session.home, worker=operator(), listen_url=session.listen_url)
    except SchemaMismatch as error:
        checks.append(Check(name="database", status="ok", message="reachable"))
        if url is None and isinstance(error, SchemaMissing | SchemaOlder):
            remedy = "Nothing to do: the next command that opens the embedded database migrates it."
            checks.append(Check(name="schema", status="info", message=error.message, remedy=remedy))
        else:
            checks.append(Check(name="schema", status="fail", message=error.message, remedy=error.remedy))
        return None
    except CustodyError as error:
        checks.append(Check(name="database", status="fail", message=error.message, remedy=error.remedy))
        return None
    if c is None:
        remedy = "Nothing to do: the first command that needs the embedded database creates it."
        checks.append(Check(name="database", status="info", message="no database yet", remedy=remedy))
        return None
    where = "embedded" if url is None else "as configured"
    checks.append(Check(name="database", status="ok", message=f"reachable ({where})"))
    return c


def _server_checks(server: Server) -> list[Check]:
    major = server.version_num // 10_000
    checks = [Check(name="postgresql", status="ok", message=f"version {server.version}")]
    if not OLDEST <= major <= NEWEST:
        checks = [
            Check(
                name="postgresql",
                status="fail" if major < OLDEST else "warn",
                message=f"version {server.version}",
                remedy=f"Use PostgreSQL {OLDEST} to {NEWEST}.",
            )
        ]
    checks.append(_connection_check(server))
    if server.default_isolation not in ("read committed", "read uncommitted"):
        cost = "which costs two more round trips for each call behind a pooler" if server.pooled else ""
        checks.append(
            Check(
                name="isolation",
                status="warn" if server.pooled else "ok",
                message=f"the default is {server.default_isolation}; Custody runs at read committed"
                + (f", {cost}" if cost else ""),
                remedy="ALTER ROLE … IN DATABASE … SET default_transaction_isolation = 'read committed'.",
            )
        )
    settings = {
        "fsync": (server.fsync, "A crash of the machine can corrupt the database. Set fsync = on."),
        "full_page_writes": (server.full_page_writes, "A torn page cannot be repaired. Set full_page_writes = on."),
        "synchronous_commit": (
            server.synchronous_commit != "off",
            "The last publishes and acks before a crash can be lost. Set synchronous_commit = on.",
        ),
    }
    for name, (good, remedy) in settings.items():
        checks.append(
            Check(name=name, status="ok", message="on")
            if good
            else Check(name=name, status="warn", message="off", remedy=remedy)
        )
    for old in server.old_transactions:
        who = old.who if old.pid is None else f"{old.who}, pid {old.pid}"
        checks.append(
            Check(
                name="old transaction",
                status="warn",
                message=f"{old.kind} since {render.moment(old.since)} ({who})",
                remedy="It keeps VACUUM from removing old rows, and may hold locks. End it, or set a timeout.",
            )
        )
    if not server.old_transactions:
        checks.append(Check(name="old transactions", status="ok", message="none open for more than a minute"))
    return checks


def _schema_check(session: Session, server: Server) -> Check:
    """Whether the schema is of this release, or of one beside it."""
    from custody.connection import planned

    message = f"version {server.schema_version}"
    try:
        steps = [] if is_remote(session.configured_url or "") else planned(session.database, home=session.home)
    except SchemaNewer:
        return Check(name="schema", status="ok", message=f"{message}, of a newer release that serves this one")
    except SchemaMismatch as error:
        return Check(name="schema", status="warn", message=error.message, remedy=error.remedy)
    if not steps:
        return Check(name="schema", status="ok", message=message)
    return Check(
        name="schema",
        status="info",
        message=f"{message}, of an older release: what is new is refused",
        remedy="custody migrate --plan shows what an upgrade would do, while everything runs.",
    )


def _connection_check(server: Server) -> Check:
    """Whether there is a connection pooler, and whether notifications of publishes arrive."""
    if not server.pooled:
        deaf = "" if server.listens else "; no notification arrives on the listen URL"
        return Check(
            name="connection",
            status="ok" if server.listens else "warn",
            message=f"direct{deaf}",
            remedy="" if server.listens else "Remove the listen URL: it is needed only behind a pooler.",
        )
    message = "through a connection pooler: Custody prepares no statements and leaves nothing in the session"
    if server.listens:
        return Check(name="connection", status="ok", message=f"{message}; notifications arrive on the listen URL")
    return Check(
        name="connection",
        status="info",
        message=f"{message}; waiting consumers poll every second",
        remedy="To wake them at once, give a URL that bypasses the pooler: --listen-url or CUSTODY_LISTEN_URL.",
    )


def _visibility_checks(time: HandlingTime) -> list[Check]:
    name = f"{time.topic}/{time.group}"
    checks = []
    if time.p99 is not None and time.recommended is not None and time.visibility_timeout < 3 * time.p99:
        checks.append(
            Check(
                name=name,
                status="warn",
                message=f"leases last {render.span(time.visibility_timeout)}, their p99 is {render.span(time.p99)}",
                remedy=f"custody groups update {time.topic} {time.group} --visibility-timeout {time.recommended:.0f}s",
            )
        )
    if time.expired:
        alive = f", {time.expired_alive} of them while their worker was alive" if time.expired_alive else ""
        remedy = "Use a longer visibility timeout." if alive else "Their workers had died: find out why."
        message = f"{counted(time.expired, 'lease')} expired in the last hour{alive}"
        checks.append(Check(name=name, status="warn", message=message, remedy=remedy))
    return checks


def _print(session: Session, checks: list[Check], times: list[HandlingTime]) -> None:
    console = render.console(color=session.color)
    width = max(len(check.name) for check in checks)
    for check in checks:
        console.print(f"{check.status:<4}", style=STYLES[check.status], end="  ")
        console.print(f"{check.name:<{width}}  {render.safe(check.message)}", soft_wrap=True)
        if check.remedy and check.status != "ok":
            console.print(f"{'':<{width + 8}}{render.safe(check.remedy)}", soft_wrap=True)
    rows = [
        [f"{t.topic}/{t.group}", t.leases, render.span(t.p50), render.span(t.p99), render.span(t.slowest),
         render.span(t.visibility_timeout), render.span(t.recommended)]
        for t in times if t.leases
    ]  # fmt: skip
    if rows:
        console.print()
        session.table(["group", "leases", "p50", "p99", "slowest", "visibility", "recommended"], rows, empty="")
