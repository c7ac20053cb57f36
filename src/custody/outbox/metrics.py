"""The figures of an outbox as Prometheus reads them."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime

from custody.outbox.events import Figures, without_secrets

_HELP = {
    "backlog": "Events that are pending.",
    "due": "Pending events whose time has come.",
    "retrying": "Pending events that have failed before.",
    "claimed": "Events that a relay has in hand.",
    "dead": "Events that were given up.",
    "published_recently": "Events published within the window.",
    "died_recently": "Events given up within the window.",
    "failures": "Attempts that what is not published has cost.",
    "oldest_seconds": "How long the oldest event has waited that is due, or has failed before.",
}


MOST = 1_000
"""So many destinations have series of their own; all others are added up."""
OTHER = "(other)"


def exposition(figures: Iterable[Figures], now: datetime | None = None) -> str:
    """Gauges `custody_outbox_…`, one for each destination as it may be shown: those that look alike are added up."""
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
