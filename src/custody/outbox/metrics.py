"""The figures of an outbox as Prometheus reads them."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime

from custody.outbox.events import Figures

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


def exposition(figures: Iterable[Figures], now: datetime | None = None) -> str:
    """Gauges `custody_outbox_…`, one for each destination."""
    now = now or datetime.now(UTC)
    found = list(figures)
    lines = []
    for name, text in _HELP.items():
        lines += [f"# HELP custody_outbox_{name} {text}", f"# TYPE custody_outbox_{name} gauge"]
        for one in found:
            if name == "oldest_seconds":
                value = 0.0 if one.oldest_pending is None else max(0.0, (now - one.oldest_pending).total_seconds())
            else:
                value = getattr(one, name)
            lines.append(f'custody_outbox_{name}{{destination="{_label(one.destination or "")}"}} {value}')
    return "\n".join(lines) + "\n"


def _label(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
