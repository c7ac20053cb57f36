"""Output: JSON with stable fields for programs, tables and lines of text for people."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import TYPE_CHECKING, Any

import msgspec

from custody.model.entities import Group, Message
from custody.model.policy import Backoff, Policy
from custody.model.setting import Settings, settings_of

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))} | {9: "\\t", 10: "\\n", 13: "\\r"}
_UNLIMITED = 1000  # columns of a table written to a pipe, so that nothing is cut


@cache
def console(*, color: bool = True, stderr: bool = False) -> Console:
    """A console for tables and progress, without markup: text of a message is never interpreted."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else max(_UNLIMITED, shutil.get_terminal_size().columns)
    return Console(stderr=stderr, no_color=not color, markup=False, emoji=False, highlight=False, width=width)


Column = str | tuple[str, str | Callable[[Any], object]]
"""A column of a table: its title, and the attribute that it shows, or what it makes of an entry."""


class Rate(str):
    """A rate, aligned like a number."""


class Trouble(str):
    """A text that is shown in colour: somebody has to look at it."""


def troubled(count: int) -> object:
    """A number that is trouble unless it is 0."""
    return Trouble(f"{count:,}") if count else count


def text(said: str) -> Text:
    """A line between tables."""
    from rich.text import Text

    return Text(safe(said), style="red" if isinstance(said, Trouble) else "")


def columns(wanted: Sequence[Column], found: Iterable[Any]) -> tuple[list[str], list[list[object]]]:
    """The titles and the rows of a table."""
    named = [(one.replace("_", " "), one) if isinstance(one, str) else one for one in wanted]
    rows = [[getattr(one, how) if isinstance(how, str) else how(one) for _, how in named] for one in found]
    return [title for title, _ in named], rows


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> Table:
    from rich.table import Table

    made = Table(box=None, pad_edge=False, header_style="bold")
    for number, name in enumerate(columns):
        numbers = any(type(row[number]) in (int, float, Rate) for row in rows)
        made.add_column(name, justify="right" if numbers else "left", overflow="fold", no_wrap=numbers)
    for row in rows:
        made.add_row(*(text(one) if isinstance(one, Trouble) else cell(one) for one in row))
    return made


def cell(value: object) -> str:
    """A value as text for people."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, datetime):
        return moment(value)
    return safe(str(value))


def safe(text: str) -> str:
    """Escapes control characters, which could move the cursor, clear the screen or break the line."""
    return text.translate(_CONTROLS)


def lines(text: str) -> list[str]:
    """The lines of a text, each with its control characters escaped."""
    return [safe(line) for line in text.splitlines()]


def moment(at: datetime, *, milliseconds: bool = False) -> str:
    """A time in the local zone."""
    return at.astimezone().isoformat(sep=" ", timespec="milliseconds" if milliseconds else "seconds")


def pause(group: Group) -> str | None:
    """Since when and why a group is paused; None if it is not."""
    return (
        None
        if group.paused_at is None
        else f"since {moment(group.paused_at)}: {group.paused_reason or 'no reason given'}"
    )


def span(value: float | timedelta | None) -> str:
    """A duration for people: `12 ms`, `3.4 s`, `5 min`, `2.5 h`."""
    if value is None:
        return "–"
    number = value.total_seconds() if isinstance(value, timedelta) else value
    if number < 1:
        return f"{number * 1000:.3g} ms"
    for limit, unit, size in ((120, "s", 1), (7200, "min", 60), (172_800, "h", 3600)):
        if number < limit:
            return f"{number / size:.3g} {unit}"
    return f"{number / 86400:.3g} d"


def age(at: datetime | None) -> str:
    """The time since then."""
    return span(None if at is None else max(0.0, (datetime.now(UTC) - at).total_seconds()))


def rate(per_second: float) -> Rate:
    """Messages per second for people: `1,234/s`, `3.2/s`, `0.05/s`; a dash for none."""
    if per_second == 0:
        return Rate("–")
    return Rate(f"{per_second:,.0f}/s" if per_second >= 100 else f"{per_second:.2g}/s")


def size(count: int) -> str:
    """A number of bytes for people: `512 kB`, `3.4 MB`, `2.5 GB`."""
    for limit, unit, unit_size in ((2**20, "kB", 2**10), (2**30, "MB", 2**20), (2**40, "GB", 2**30)):
        if count < limit:
            return f"{count / unit_size:.3g} {unit}"
    return f"{count / 2**40:.3g} TB"


def payload(value: Any) -> str:
    """A payload on one line."""
    if isinstance(value, bytes):
        return safe(repr(value))
    return safe(value if isinstance(value, str) else msgspec.json.encode(value).decode())


def message(found: Message) -> str:
    """One message on one line."""
    parts = [f"{found.partition}/{found.offset}", f"key={safe(found.key)}" if found.key is not None else ""]
    parts.append(f"routing={safe(found.routing_key)}" if found.routing_key is not None else "")
    parts.append(f"attempt={found.attempt}" if found.attempt > 1 else "")
    parts += [f"{safe(name)}={safe(text)}" for name, text in found.headers.items() if not name.startswith("x-custody-")]
    return "  ".join([part for part in parts if part] + [payload(found.payload)])


def policy(group: Group) -> dict[str, object]:
    """A group's policy, one line for each setting."""
    if group.policy is None:
        return {}
    return {setting.name: _shown(getattr(group.policy, setting.name)) for setting in settings_of(Policy)}


def _shown(value: object) -> object:
    """A setting as text for people."""
    if isinstance(value, Settings):
        parts = [f"{one.name} {_shown(getattr(value, one.name))}" for one in settings_of(type(value))]
        return ", ".join([value.kind, *parts] if isinstance(value, Backoff) else parts)
    if isinstance(value, timedelta):
        return span(value)
    return "none" if value is None else value
