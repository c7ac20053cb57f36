"""The figures of an outbox in the format of Prometheus."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime

from custody.outbox.events import Figures, without_secrets

_HELP = {
    "backlog": "Events that are pending.",
    "due": "Pending events that are due.",
    "retrying": "Pending events that have failed before.",
    "claimed": "Events that a relay has claimed.",
    "dead": "Dead events.",
    "published_recently": "Events published within the window.",
    "died_recently": "Events that died within the window.",
    "failures": "Attempts so far for events that are not published.",
    "oldest_seconds": "Age of the oldest event that is due, or has failed before.",
}


MOST = 1_000
"""Most destinations with series of their own; all others are added up."""
OTHER = "(other)"


def exposition(figures: Iterable[Figures], now: datetime | None = None) -> str:
    """Gauges `custody_outbox_…` by destination, without secrets. Destinations that look the same then are added up."""
    now = now or datetime.now(UTC)
    found: dict[str, dict[str, float]] = {}
    for one in figures:
        name = without_secrets(one.destination or "")
        if name not in found and len(found) >= MOST:
            name = OTHER
        sums = found.setdefault(name, dict.fromkeys(_HELP, 0))
        for name in _HELP:
            if name != "oldest_seconds":
                sums[name] += getattr(one, name)
            elif one.oldest_pending is not None:
                sums[name] = max(sums[name], (now - one.oldest_pending).total_seconds())
    lines = []
    for name, text in _HELP.items():
        lines += [f"# HELP custody_outbox_{name} {text}", f"# TYPE custody_outbox_{name} gauge"]
        lines += [
            f'custody_outbox_{name}{{destination="{_label(destination)}"}} {sums[name]}'
            for destination, sums in found.items()
        ]
    return "\n".join(lines) + "\n"


def _label(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
