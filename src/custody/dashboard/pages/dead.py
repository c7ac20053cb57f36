"""Dead letters: a list with filters, one of them with its errors, and a download."""

from __future__ import annotations

from typing import Any, cast
from urllib.parse import urlencode

from custody.dashboard.pages.groups import said
from custody.dashboard.reply import Download, Page
from custody.dashboard.visit import Visit
from custody.engine import Custody
from custody.engine.dead_letters import DeadConditions
from custody.errors import NotFound
from custody.model.entities import DeadLetter
from custody.model.plain import to_json

MOST = 100
"""Dead letters of one page."""
DOWNLOAD = 10_000
"""Most dead letters of a download, which ends with the one that reaches 16 MB of payload."""
FILTERS = ("where_error", "key", "partition", "died_from", "died_until", "died_of")


async def dead(visit: Visit) -> Page:
    letters = await visit.ask(Custody.dead, visit.topic, visit.group, limit=MOST + 1, **conditions(visit))
    chosen = {name: visit.text(name) or "" for name in FILTERS}
    return Page(
        "dead.html",
        {
            "group": await visit.ask(Custody.group, visit.topic, visit.group),
            "letters": letters[:MOST],
            "more": len(letters) > MOST,
            "filters": chosen,
            "filtered": any(chosen.values()),
            "query": urlencode({name: value for name, value in chosen.items() if value}),
            "may_act": visit.may(Custody.redrive, visit.topic),
            "said": said(visit),
        },
    )


async def letter(visit: Visit) -> Page:
    partition, offset = visit.place
    found = await visit.ask(Custody.dead, visit.topic, visit.group, limit=1, partition=partition, offsets=[offset])
    if not found:
        raise NotFound(
            f"{visit.topic}/{partition}/{offset} is not dead in {visit.group}",
            "It may have been redriven or discarded: the page of the message shows its history.",
        )
    return Page("letter.html", {"letter": found[0], "group": visit.group, "may_act": _may(visit)})


async def download(visit: Visit) -> Download:
    letters = await visit.ask(Custody.dead, visit.topic, visit.group, limit=DOWNLOAD, **conditions(visit))
    body = await visit.state.run(_lines, letters)
    name = f"dead-{visit.topic}-{visit.group}.ndjson"  # names of topics and groups are plain
    return Download(name=name, body=body, content_type=b"application/x-ndjson")


def conditions(visit: Visit) -> DeadConditions:
    """The filter that the query or the form names."""
    given: dict[str, Any] = {
        "where_error": visit.text("where_error"),
        "key": visit.text("key"),
        "partition": visit.partition(),
        "died_from": visit.moment("died_from"),
        "died_until": visit.moment("died_until"),
        "died_of": visit.text("died_of"),
    }
    return cast("DeadConditions", {name: value for name, value in given.items() if value is not None})


def _may(visit: Visit) -> bool:
    return visit.may(Custody.redrive, visit.topic)


def _lines(letters: list[DeadLetter]) -> bytes:
    return "".join(f"{to_json(one)}\n" for one in letters).encode()
