"""What the metrics of a server and those of workers have in common: names, texts and labels."""

from __future__ import annotations

from importlib.metadata import version

VERSION = version("custody")
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
GROUP = ["topic", "group"]

Described = tuple[str, str, list[str]]

RECEIVED: Described = ("custody_messages_received", "Messages that were delivered.", GROUP)
REDELIVERED: Described = (
    "custody_messages_redelivered",
    "Messages that were handed out again: their attempt is not the first.",
    GROUP,
)
SETTLED: Described = ("custody_messages_settled", "Messages that were settled, by outcome.", [*GROUP, "outcome"])
DEAD: Described = ("custody_messages_dead", "Messages that died when they were settled.", GROUP)
