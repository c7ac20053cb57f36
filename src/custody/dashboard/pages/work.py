"""Workers, pipelines, schedules and the outbox."""

from __future__ import annotations

from custody.dashboard.pages.overview import visible
from custody.dashboard.reply import Page
from custody.dashboard.visit import Visit
from custody.engine import Custody


async def workers(visit: Visit) -> Page:
    found = await visit.ask(Custody.workers)
    # the state of pipelines is part of the status, which needs the same right
    pipelines = await visit.state.run(visit.state.engine.pipelines)
    return Page("workers.html", {"workers": found, "pipelines": pipelines})


async def schedules(visit: Visit) -> Page:
    return Page("schedules.html", {"schedules": await visit.ask(Custody.schedules)})


async def outbox(visit: Visit) -> Page:
    visit.caller.require_everywhere("consume")
    return Page("outbox.html", {"outbox": (await visible(visit)).outbox})
