"""Templates, and how they show numbers, times, and texts that somebody else has written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any

import jinja2
import msgspec
from msgspec import Raw

MOST = 64 * 1024
"""Characters of a payload that a page shows. A download has all of it."""
BYTES = 1024
"""Bytes of a binary payload that a page shows."""
_HIDDEN = {
    code: f"\\u{code:04x}"
    for code in (
        *(each for each in range(32) if each not in (9, 10)),
        *range(127, 160),
        *(0x061C, 0x200B, 0x200E, 0x200F, 0x2028, 0x2029, 0xFEFF),
        *range(0x202A, 0x202F),
        *range(0x2066, 0x206A),
    )
}
"""Characters that cannot be seen, or change the direction of what follows: they are shown as escapes."""


@cache
def environment() -> jinja2.Environment:
    """The templates. Every value is escaped; an unknown name is an error."""
    made = jinja2.Environment(
        loader=jinja2.PackageLoader("custody.dashboard"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    made.filters |= {
        "number": number, "counted": counted, "rate": rate, "size": size, "span": span, "age": age,
        "moment": moment, "precise": precise, "clock": clock, "shown": shown, "short": short, "payload": payload,
    }  # fmt: skip
    return made


def render(template: str, values: Mapping[str, Any]) -> bytes:
    # a lone surrogate, which JSON allows, is no UTF-8
    return environment().get_template(template).render(values).encode(errors="backslashreplace")


def number(value: int | None) -> str:
    return "–" if value is None else f"{value:,}"


def counted(count: int, noun: str) -> str:
    """`1 message`, `1,000 messages`."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def span(value: float | timedelta | None) -> str:
    """A duration: `3.4 s`, `5 min`, `2.5 h`."""
    if value is None:
        return "–"
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    for limit, unit, size in ((120, "s", 1), (7200, "min", 60), (172_800, "h", 3600)):
        if seconds < limit:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 86400:.3g} d"


def age(at: datetime | None) -> str:
    """The time since then."""
    return span(None if at is None else max(0.0, (datetime.now(UTC) - at).total_seconds()))


def precise(at: datetime | None) -> str:
    """A time in UTC with milliseconds."""
    return "–" if at is None else f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S}.{at.microsecond // 1000:03}"


def moment(at: datetime | None) -> str:
    """A time in UTC."""
    return "–" if at is None else f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


def clock(at: datetime | None) -> str:
    """The time of day in UTC; with the date if it is another day."""
    if at is None:
        return "–"
    utc = at.astimezone(UTC)
    return f"{utc:%H:%M:%S}" if utc.date() == datetime.now(UTC).date() else f"{utc:%Y-%m-%d %H:%M}"


def rate(per_second: float | None) -> str:
    if per_second is None or per_second == 0:
        return "–"
    return f"{per_second:,.0f}/s" if per_second >= 100 else f"{per_second:.2g}/s"


def size(count: int) -> str:
    """A number of bytes: `512 kB`, `3.4 MB`."""
    for limit, unit, unit_size in ((2**10, "bytes", 1), (2**20, "kB", 2**10), (2**30, "MB", 2**20)):
        if count < limit:
            return f"{count / unit_size:.3g} {unit}"
    return f"{count / 2**30:.3g} GB"


def shown(text: object, most: int = MOST) -> str:
    """A text of somebody else, without characters that hide or reorder what follows."""
    whole = str(text)
    cut = whole[:most].translate(_HIDDEN)
    return cut if len(whole) <= most else f"{cut} … ({len(whole) - most:,} more characters)"


def short(value: Any, most: int = 120) -> str:
    """A payload on one line."""
    if isinstance(value, bytes):
        return f"{len(value):,} bytes: {value[:24].hex(' ')}{' …' if len(value) > 24 else ''}"
    return shown(" ".join(_text(value)[: 4 * most].split()), most)


def payload(value: Any) -> str:
    """A payload on as many lines as it needs: JSON indented, bytes as hexadecimal numbers beside characters."""
    if isinstance(value, bytes):
        return _dump(value)
    if isinstance(value, str):
        return shown(value)
    text = _text(value)
    return shown(text if len(text) > 8 * MOST else msgspec.json.format(text, indent=2))


def _text(value: Any) -> str:
    if isinstance(value, Raw):
        return bytes(value).decode()
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _dump(value: bytes) -> str:
    lines = []
    for start in range(0, min(len(value), BYTES), 16):
        part = value[start : start + 16]
        letters = "".join(chr(each) if 32 <= each < 127 else "." for each in part)
        lines.append(f"{start:06x}  {part.hex(' '):<47}  {letters}")
    if len(value) > BYTES:
        lines.append(f"… ({len(value) - BYTES:,} more bytes)")
    return "\n".join(lines)
