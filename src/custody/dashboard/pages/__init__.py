"""The pages: method, path and handler of each. A handler calls verbs and fills a template."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from custody.dashboard.pages import acting, dead, groups, messages, overview, topics, work
from custody.dashboard.reply import Reply
from custody.dashboard.visit import Visit

Handler = Callable[[Visit], Awaitable[Reply]]

GROUP = "/ui/topics/{topic}/groups/{group}"

# the first path that matches is answered: names come before placeholders
PAGES: list[tuple[str, str, Handler]] = [
    ("GET", "/ui", overview.overview),
    ("GET", "/ui/", overview.overview),
    ("GET", "/ui/topics", topics.topics),
    ("GET", "/ui/topics/{topic}", topics.topic),
    ("GET", "/ui/workers", work.workers),
    ("GET", "/ui/schedules", work.schedules),
    ("POST", "/ui/schedules/{name}/pause", work.pause_schedule),
    ("POST", "/ui/schedules/{name}/resume", work.resume_schedule),
    ("POST", "/ui/schedules/{name}/run", work.run_schedule),
    ("GET", "/ui/outbox", work.outbox),
    ("GET", "/ui/message", messages.find),
    ("GET", "/ui/topics/{topic}/messages/{partition}/{offset}", messages.message),
    ("GET", "/ui/topics/{topic}/messages/{partition}/{offset}/payload", messages.payload),
    ("GET", GROUP, groups.group),
    ("GET", GROUP + "/rewind", groups.rewind),
    ("GET", GROUP + "/dead", dead.dead),
    ("GET", GROUP + "/dead.ndjson", dead.download),
    ("GET", GROUP + "/dead/{partition}/{offset}", dead.letter),
    *(("POST", f"{GROUP}/{name}", acting.handler(action)) for name, action in acting.ACTIONS.items()),
]
