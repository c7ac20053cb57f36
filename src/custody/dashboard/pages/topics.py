"""Topics: what they hold and keep, their groups, and delayed messages."""

from __future__ import annotations

import asyncio

from custody.dashboard.pages.overview import visible
from custody.dashboard.reply import Page
from custody.dashboard.visit import Visit
from custody.engine import Custody

DELAYED = 20
"""Delayed messages of one page: those that are due next."""


async def topics(visit: Visit) -> Page:
    found = [one for one in await visit.ask(Custody.topics) if visit.may(Custody.topic, one.name)]
    status = await visible(visit)
    groups = {one.name: [group for group in status.groups if group.topic == one.name] for one in found}
    rates = {one.name: visit.watch.published_rate(one.name) for one in found}
    return Page("topics.html", {"topics": found, "groups": groups, "rates": rates})


async def topic(visit: Visit) -> Page:
    name = visit.topic
    of, segments, kept, delayed, count, status = await asyncio.gather(
        visit.ask(Custody.topic, name),
        visit.ask(Custody.segments, name),
        visit.ask(Custody.kept_aside, name),
        visit.ask(Custody.delayed, name, limit=DELAYED),
        visit.ask(Custody.delayed_count, name),
        visible(visit),
    )
    return Page(
        "topic.html",
        {
            "topic": of,
            "segments": segments,
            "kept": kept,
            "delayed": delayed,
            "delayed_count": count,
            "groups": [one for one in status.groups if one.topic == name],
            "published": visit.watch.published_rate(name),
        },
    )
