"""What operators do. An action that cannot be undone, or that moves many messages, first shows what it would do."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from custody.dashboard.pages.dead import conditions
from custody.dashboard.reply import Moved, Page, Reply
from custody.dashboard.visit import Visit
from custody.engine import Custody
from custody.engine.dead_letters import DeadConditions
from custody.errors import InvalidArgument
from custody.model.entities import DeadLetter, Rewound
from custody.model.limits import LARGEST, SMALL

SAMPLE = 10
"""Messages that a preview shows."""


@dataclass(frozen=True, kw_only=True)
class Preview:
    """What an action would do: how many messages, some of them, and the button that does it."""

    title: str
    button: str
    count: int | None = None
    letters: Sequence[DeadLetter] = ()
    rewound: Sequence[Rewound] = ()
    warning: str | None = None


@dataclass(frozen=True, kw_only=True)
class Action:
    """`do` returns a number for the message that follows. `back` is the page below the group to which it leads."""

    name: str
    do: Callable[[Visit], Awaitable[int]]
    preview: Callable[[Visit], Awaitable[Preview]] | None = None
    back: str = ""


def handler(action: Action) -> Callable[[Visit], Awaitable[Reply]]:
    """The page of an action: its preview, or with `step=do` the action itself, which leads back to the group."""

    async def act(visit: Visit) -> Reply:
        visit.caller.require("admin", [visit.topic])
        group = f"/ui/topics/{visit.topic}/groups/{visit.group}"
        if action.preview is not None and visit.text("step") != "do":
            fields = [(name, one) for name, values in visit.form.items() if name != "step" for one in values]
            shown = await action.preview(visit)
            return Page(
                "preview.html",
                {"preview": shown, "fields": fields, "action": f"{group}/{action.name}", "back": group + action.back,
                 "topic": visit.topic, "group": visit.group},
            )  # fmt: skip
        count = await action.do(visit)
        return Moved(to=f"{group}{action.back}?{urlencode({'did': action.name, 'count': count})}")

    return act


async def pause(visit: Visit) -> int:
    return int(await visit.ask(Custody.pause, visit.topic, visit.group, reason=visit.text("reason")))


async def resume(visit: Visit) -> int:
    changed = await visit.ask(Custody.resume, visit.topic, visit.group)
    visit.state.long_polls.wake(visit.topic)
    return int(changed)


async def retry(visit: Visit) -> int:
    key, error = visit.text("key"), visit.text("where_error")
    return await visit.ask(Custody.retry_now, visit.topic, visit.group, key=key, where_error=error)


async def preview_release(visit: Visit) -> Preview:
    key = _required(visit, "key")
    letters = await visit.ask(Custody.dead, visit.topic, visit.group, key=key, limit=SAMPLE)
    held = [one for one in letters if one.held]
    return Preview(
        title=f"Release key {key}",
        button="Release the key",
        letters=held,
        warning="The later messages of the key are delivered, without the dead one before them. It stays dead.",
    )


async def release(visit: Visit) -> int:
    reason = visit.text("reason")
    return await visit.ask(Custody.release_key, visit.topic, visit.group, _required(visit, "key"), reason=reason)


async def preview_skip(visit: Visit) -> Preview:
    partition, offset = _place(visit)
    return Preview(
        title=f"Skip {visit.topic}/{partition}/{offset}",
        button="Skip the message",
        count=1,
        warning="The message counts as done, without being processed. This cannot be undone, except by a rewind.",
    )


async def skip(visit: Visit) -> int:
    partition, offset = _place(visit)
    await visit.ask(Custody.skip, visit.topic, visit.group, partition, offset, reason=visit.text("reason"))
    return 1


async def preview_rewind(visit: Visit) -> Preview:
    parts = await _rewind(visit, dry_run=True)
    return Preview(
        title="Rewind",
        button="Rewind",
        count=sum(one.messages for one in parts),
        rewound=parts,
        warning="These messages are delivered again, also those that are done. Leases of them are revoked.",
    )


async def rewind(visit: Visit) -> int:
    return sum(one.messages for one in await _rewind(visit, dry_run=False))


async def _rewind(visit: Visit, *, dry_run: bool) -> list[Rewound]:
    return await visit.ask(
        Custody.rewind,
        visit.topic,
        visit.group,
        to_offset=visit.number("to_offset"),
        to_time=visit.moment("to_time"),
        partition=visit.partition(),
        dry_run=dry_run,
        reason=visit.text("reason"),
    )


def _on_dead(verb: Callable[..., Any], title: str, warning: str) -> Action:
    """An action on dead letters: on those that are chosen, or on all that match the filter."""

    async def settle(visit: Visit, *, dry_run: bool) -> int:
        reason, count = visit.text("reason"), 0
        for which in _chosen(visit):
            settled = await visit.ask(verb, visit.topic, visit.group, dry_run=dry_run, reason=reason, **which)
            count += len(settled)
        return count

    async def preview(visit: Visit) -> Preview:
        count, letters = await settle(visit, dry_run=True), list[DeadLetter]()
        for which in _chosen(visit):
            if len(letters) < SAMPLE:
                rest = SAMPLE - len(letters)
                letters += await visit.ask(Custody.dead, visit.topic, visit.group, limit=rest, **which)
        return Preview(title=f"{title} dead letters", button=title, count=count, letters=letters, warning=warning)

    async def do(visit: Visit) -> int:
        return await settle(visit, dry_run=False)

    return Action(name=verb.__name__, do=do, preview=preview, back="/dead")


def _chosen(visit: Visit) -> list[DeadConditions]:
    """The conditions of an action: one for each partition with chosen messages, or the filter."""
    places: dict[int, list[int]] = {}
    for text in visit.texts("chosen"):
        partition, _, offset = text.partition("/")
        if not (_is_number(partition, SMALL) and _is_number(offset, LARGEST)):
            raise InvalidArgument(f"{text[:100]!r} is not a message", "Choose it on the page of dead letters.")
        places.setdefault(int(partition), []).append(int(offset))
    if places:
        return [DeadConditions(partition=partition, offsets=places[partition]) for partition in sorted(places)]
    if visit.text("which") != "filter":
        raise InvalidArgument("no message is chosen", "Tick the messages, or use the button for all that match.")
    return [conditions(visit)]


def _is_number(text: str, most: int) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 20 and int(text) <= most


def _required(visit: Visit, name: str) -> str:
    # as it is: a key may begin or end with spaces
    found = next(iter(visit.texts(name)), "")
    if not found or "\0" in found:
        raise InvalidArgument(f"{name} is missing", "Use the button on the page of the group.", path=name)
    return found


def _place(visit: Visit) -> tuple[int, int]:
    partition, offset = visit.partition(), visit.number("offset")
    if partition is None or offset is None:
        raise InvalidArgument("the message is missing", "Use the button on the page of the group.")
    return partition, offset


ACTIONS = {
    one.name: one
    for one in (
        Action(name="pause", do=pause),
        Action(name="resume", do=resume),
        Action(name="retry", do=retry),
        Action(name="release", do=release, preview=preview_release),
        Action(name="skip", do=skip, preview=preview_skip),
        Action(name="rewind", do=rewind, preview=preview_rewind),
        _on_dead(Custody.redrive, "Redrive", "They are delivered again, with their attempts reset."),
        _on_dead(Custody.discard, "Discard", "They count as resolved without being processed. This cannot be undone."),
    )
}
