"""Workers, pipelines, schedules and the outbox."""

from __future__ import annotations

from custody.dashboard.pages.overview import visible
from custody.dashboard.reply import Moved, Page
from custody.dashboard.visit import Visit
from custody.engine import Custody

TICKED = {
    "pause": "The schedule is paused.",
    "resume": "The schedule goes on.",
    "run": "A tick was published.",
}


async def workers(visit: Visit) -> Page:
    found = await visit.ask(Custody.workers)
    # the state of pipelines is part of the status, which needs the same right
    pipelines = await visit.state.run(visit.state.engine.pipelines)
    return Page("workers.html", {"workers": found, "pipelines": pipelines})


async def schedules(visit: Visit) -> Page:
    return Page(
        "schedules.html",
        {
            "schedules": await visit.ask(Custody.schedules),
            "may_act": visit.may(Custody.pause_schedule),
            "said": TICKED.get(visit.text("did") or ""),
        },
    )


async def pause_schedule(visit: Visit) -> Moved:
    await visit.ask(Custody.pause_schedule, visit.params["name"], reason=visit.text("reason"))
    return Moved(to="/ui/schedules?did=pause")


async def resume_schedule(visit: Visit) -> Moved:
    await visit.ask(Custody.resume_schedule, visit.params["name"])
    return Moved(to="/ui/schedules?did=resume")


async def run_schedule(visit: Visit) -> Moved:
    """A tick now, beside those that are due."""
    await visit.ask(Custody.run_schedule, visit.params["name"])
    return Moved(to="/ui/schedules?did=run")


async def outbox(visit: Visit) -> Page:
    visit.caller.require_everywhere("consume")
    return Page("outbox.html", {"outbox": (await visible(visit)).outbox})
