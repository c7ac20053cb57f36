"""A group: its figures, partitions, blocked keys, workers and policy, and what an operator can do."""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import urlencode

from custody.dashboard.pages.overview import chips
from custody.dashboard.picture import STATES, sparkline, strip
from custody.dashboard.rendering import span
from custody.dashboard.reply import Page
from custody.dashboard.visit import Visit
from custody.engine import Custody
from custody.model.entities import BlockedKey, Group
from custody.model.insights import LeaseStatus
from custody.model.plain import plain

KEYS = 100
"""Blocked keys of one page."""
LEASES = 100
"""Leases of one page: those that end first."""
PLAIN = ("jitter", "rate", "factor")
"""Settings that are numbers; all others with a fraction are seconds."""
DONE = {
    "pause": "The group is paused.",
    "resume": "The group goes on.",
    "retry": "Due now: {} message(s) that waited for a retry.",
    "release": "The key is released; {} dead message(s) had held it.",
    "skip": "The message is skipped.",
    "redrive": "Redriven: {} message(s).",
    "discard": "Discarded: {} message(s).",
    "rewind": "Rewound: {} message(s) are delivered again.",
}


async def group(visit: Visit) -> Page:
    zoom = {name: number for name in ("partition", "from", "until") if (number := visit.number(name)) is not None}
    of, stats, status, strips = await asyncio.gather(
        visit.ask(Custody.group, visit.topic, visit.group),
        visit.ask(Custody.stats, visit.topic, visit.group),
        visit.watch.status(),
        visit.ask(
            Custody.offset_map,
            visit.topic,
            visit.group,
            partition=visit.partition(),
            from_offset=zoom.get("from"),
            until_offset=zoom.get("until"),
        ),
    )
    one = next((one for one in status.groups if (one.topic, one.group) == (visit.topic, visit.group)), None)
    blocked: list[BlockedKey] = []
    leases: list[LeaseStatus] = []
    if not of.bare:
        blocked = await visit.ask(Custody.blocked_keys, visit.topic, visit.group, limit=KEYS + 1)
        leases = await visit.ask(Custody.leases, visit.topic, visit.group, limit=LEASES + 1)
    return Page(
        "group.html",
        {
            "group": of,
            "stats": stats,
            "status": one,
            "chips": [] if one is None else chips(one),
            "published": visit.watch.published_rate(visit.topic),
            "spark": sparkline(visit.watch.lags(visit.topic, visit.group)),
            "blocked": blocked[:KEYS],
            "more_blocked": len(blocked) > KEYS,
            "leases": leases[:LEASES],
            "more_leases": len(leases) > LEASES,
            "strips": [strip(one) for one in strips],
            "states": STATES,
            "zoom": zoom,
            "live_at": f"/ui/topics/{visit.topic}/groups/{visit.group}" + (f"?{urlencode(zoom)}" if zoom else ""),
            "policy": policy(of),
            "may_act": visit.may(Custody.pause, visit.topic),
            "said": said(visit),
        },
    )


async def rewind(visit: Visit) -> Page:
    """The form of a rewind."""
    visit.caller.require("admin", [visit.topic])
    return Page("rewind.html", {"group": await visit.ask(Custody.group, visit.topic, visit.group)})


def policy(group: Group) -> list[tuple[str, str]]:
    """The settings of a group, as they are written in a policy."""
    found: dict[str, Any] = {} if group.policy is None else group.policy.plain()
    return [(name.replace("_", " "), "–" if value is None else _words(name, value)) for name, value in found.items()]


def _words(name: str, value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{one.replace('_', ' ')} {_words(one, of)}" for one, of in plain(value).items())
    if isinstance(value, float) and name not in PLAIN:
        return span(value)
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)


def said(visit: Visit) -> str | None:
    """What an action did, after it has led here."""
    sentence = DONE.get(visit.text("did") or "")
    return None if sentence is None else sentence.format(f"{visit.number('count') or 0:,}")
