"""An incident: one message of a group, what came before it in its key, and its attempts, read through the façade."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from custody.engine import Custody
from custody.errors import InvalidArgument, OffsetOutOfRange
from custody.model.codec import encode
from custody.model.entities import HistoryEntry, Message
from custody.model.policy import Policy
from custody.testing.replay import Attempt, attempts_in

PAGE = 500
SCANNED = 20_000
"""Most messages before it in the partition that are looked at for those of its key."""
LARGEST = 16 * 2**20
"""Most bytes of payloads."""


@dataclass(frozen=True, kw_only=True)
class Incident:
    """What is needed to let it happen again. `before` are earlier messages of the key, oldest first."""

    message: Message
    before: tuple[Message, ...]
    group: str
    policy: Policy
    attempts: tuple[Attempt, ...]
    traceback: str | None
    """The end of the last traceback."""

    @property
    def messages(self) -> tuple[Message, ...]:
        return (*self.before, self.message)


def incident_of(c: Custody, topic: str, partition: int, offset: int, *, group: str | None, before: int) -> Incident:
    """Reads the incident. Without a group it is the only one that has had the message."""
    entries = c.trace(topic, partition, offset)
    named = group or _only_group(topic, partition, offset, entries)
    policy = c.group(topic, named).policy
    if policy is None:
        raise InvalidArgument(f"group {named} of topic {topic} is bare: it has no attempts", "Name another group.")
    history = [entry for entry in entries if entry.group == named]
    message = _read(c, topic, partition, offset, named)
    attempts = attempts_in(history)
    if not attempts:
        forgotten = any(entry.kind == "forgotten" for entry in entries)
        raise OffsetOutOfRange(
            f"the journal has no attempt of {topic}/{partition}/{offset} in group {named}"
            + (": what happened before was dropped by its retention" if forgotten else ""),
            f"`custody trace {topic} {partition} {offset}` shows what there is.",
        )
    found = Incident(
        message=message,
        before=tuple(_earlier(c, message, before)) if before and message.key is not None else (),
        group=named,
        policy=policy,
        attempts=tuple(attempts),
        traceback=next((entry.traceback for entry in reversed(history) if entry.traceback), None),
    )
    size = sum(len(encode(one.payload)[1]) for one in found.messages)
    if size > LARGEST:
        raise InvalidArgument(
            f"the payloads have {size:,} bytes; a test has at most {LARGEST:,}", "Capture fewer with --before."
        )
    return found


def _only_group(topic: str, partition: int, offset: int, entries: Sequence[HistoryEntry]) -> str:
    groups = sorted({entry.group for entry in entries if entry.kind == "claim"})
    if len(groups) == 1:
        return groups[0]
    place = f"{topic}/{partition}/{offset}"
    if not groups:
        raise OffsetOutOfRange(
            f"the journal has no attempt of {place} in any group",
            f"`custody trace {topic} {partition} {offset}` shows what there is.",
        )
    raise InvalidArgument(f"several groups have had {place}: {', '.join(groups)}", "Name one of them with --group.")


def _read(c: Custody, topic: str, partition: int, offset: int, group: str) -> Message:
    """From the log, or from the dead letters: these are kept when retention drops a segment."""
    try:
        found = c.read(topic, partition, offset=offset, max_messages=1)
    except OffsetOutOfRange as error:
        letters = c.dead(topic, group, partition=partition, offsets=[offset])
        if not letters:
            remedy = "Retention has dropped it. Capture a later message, or keep the topic for longer."
            raise OffsetOutOfRange(error.message, remedy) from error
        return letters[0]
    if not found or found[0].offset != offset:
        raise OffsetOutOfRange(
            f"{topic}/{partition} has no offset {offset}", f"`custody topics describe {topic}` shows its offsets."
        )
    return found[0]


def _earlier(c: Custody, message: Message, most: int) -> list[Message]:
    """The last messages of its key before it, as far as the log goes back."""
    found: list[Message] = []
    for page in _pages_before(c, message):
        found = [one for one in page if one.key == message.key] + found
        if len(found) >= most:
            break
    return found[-most:]


def _pages_before(c: Custody, message: Message) -> Iterator[list[Message]]:
    """Pages of the partition before the message, from the newest to the oldest."""
    first = max(c.topic(message.topic).first_offsets[message.partition], message.offset - SCANNED)
    until = message.offset
    while until > first:
        start = max(first, until - PAGE)
        page: list[Message] = []
        while start < until:  # over HTTP an answer ends with the message that reaches a limit of bytes
            part = c.read(message.topic, message.partition, offset=start, max_messages=until - start)
            if not part:
                break
            page += part
            start = part[-1].offset + 1
        yield page
        until = max(first, until - PAGE)
