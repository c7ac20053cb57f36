"""The overview: every group, the worst first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from custody.dashboard.picture import sparkline
from custody.dashboard.reply import Page
from custody.dashboard.visit import Visit
from custody.model.status import GroupStatus, Status

MOST = 500
"""Groups of one page; a search finds the others."""
SORTS: dict[str, tuple[str, Callable[[GroupStatus], Any]]] = {
    "group": ("by name", lambda one: (one.topic, one.group)),
    "lag": ("by lag", lambda one: -one.lag),
    "oldest": ("by oldest message", lambda one: -(one.oldest_unresolved_age or 0)),
    "dead": ("by dead letters", lambda one: -one.dead),
    "waiting": ("by retries", lambda one: -one.waiting),
    "in_flight": ("in flight", lambda one: -one.in_flight),
    "done": ("by rate", lambda one: -one.done_rate),
}
"""The orders beside that of the status, the worst first."""
SEVERE = ("pipeline failed", "pipeline gone", "breaker open", "no worker", "dead letters")
"""Troubles that are shown in red; the others in amber."""


async def overview(visit: Visit) -> Page:
    found = await visible(visit)
    search, sort, only = visit.text("q"), visit.text("sort"), visit.text("only")
    groups = [one for one in found.groups if search is None or search.lower() in f"{one.topic}/{one.group}".lower()]
    if only == "trouble":
        groups = [one for one in groups if one.trouble]
    if sort in SORTS:
        groups.sort(key=SORTS[sort][1])
    rows = [
        {
            "of": one,
            "chips": chips(one),
            "published": visit.watch.published_rate(one.topic),
            "spark": sparkline(visit.watch.lags(one.topic, one.group)),
        }
        for one in groups[:MOST]
    ]
    return Page(
        "overview.html",
        {
            "status": found,
            "rows": rows,
            "more": len(groups) - len(rows),
            "matching": len(groups),
            "search": search or "",
            "sort": sort if sort in SORTS else "",
            "only": only or "",
            "sorts": SORTS,
            "troubled": sum(bool(one.trouble) for one in found.groups),
            "severe": any(one in SEVERE for group in found.groups for one in group.trouble),
            "dead": sum(one.dead for one in found.groups),
            "claimed": sum(one.claimed_rate for one in found.groups),
            "done": sum(one.done_rate for one in found.groups),
            "published": sum(visit.watch.published_rate(one.topic) or 0 for one in found.topics),
            "unattended": len(found.topics) and not found.groups,
        },
    )


async def visible(visit: Visit) -> Status:
    """The status, without topics on which the caller has no right. Without a right on any topic it is refused."""
    visit.caller.require("consume", ())
    found = await visit.watch.status()
    if visit.caller.may_everywhere("consume"):
        return found
    return Status(
        topics=tuple(one for one in found.topics if visit.caller.may("consume", one.topic)),
        groups=tuple(one for one in found.groups if visit.caller.may("consume", one.topic)),
        schedules=tuple(one for one in found.schedules if visit.caller.may("consume", one.topic)),
        outbox=(),
    )


def chips(one: GroupStatus) -> list[tuple[str, str]]:
    """The troubles of a group, each with how it is shown."""
    return [(trouble, "bad" if trouble in SEVERE else "warn") for trouble in one.trouble]
