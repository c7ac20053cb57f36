"""One message of the log, and its history in each group."""

from __future__ import annotations

from itertools import groupby
from urllib.parse import quote

import msgspec

from custody.dashboard.reply import Download, Moved, Page, Reply
from custody.dashboard.visit import Visit
from custody.engine import Custody
from custody.errors import NotFound
from custody.model.entities import Message


async def find(visit: Visit) -> Reply:
    """Leads to the message that the form names; without a message it shows the form."""
    topic, partition, offset = visit.text("topic"), visit.partition(), visit.number("offset")
    if topic is not None and offset is not None:
        return Moved(to=f"/ui/topics/{quote(topic, safe='')}/messages/{partition or 0}/{offset}")
    topics = [one.name for one in await visit.ask(Custody.topics) if visit.may(Custody.read, one.name)]
    return Page("find.html", {"topics": topics, "topic": topic or ""})


async def message(visit: Visit) -> Page:
    partition, offset = visit.place
    found = await _message(visit)
    entries = await visit.ask(Custody.trace, visit.topic, partition, offset)
    by_group = {
        name: list(of) for name, of in groupby(sorted(entries, key=lambda one: one.group), key=lambda one: one.group)
    }
    return Page("message.html", {"message": found, "by_group": by_group})


async def payload(visit: Visit) -> Download:
    """The payload, byte for byte."""
    found = await _message(visit)
    value = found.payload
    body = value if isinstance(value, bytes) else bytes(value) if isinstance(value, msgspec.Raw) else value.encode()
    name = f"{found.topic}-{found.partition}-{found.offset}"
    return Download(name=name, body=body, content_type=b"application/octet-stream")


async def _message(visit: Visit) -> Message:
    partition, offset = visit.place
    found = await visit.ask(Custody.read, visit.topic, partition, offset=offset, max_messages=1)
    if not found or found[0].offset != offset:
        raise NotFound(
            f"there is no message {visit.topic}/{partition}/{offset}",
            "The log ends before it, or retention dropped it.",
        )
    return found[0]
