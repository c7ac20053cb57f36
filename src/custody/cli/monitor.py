"""Options of commands that run until they are stopped: ports for metrics and for health."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from custody.cli.arguments import DURATION
from custody.cli.session import Session
from custody.model.policy import seconds
from custody.monitoring import Health, answering
from custody.monitoring.listening import Page, health_page
from custody.vitals import Vitals

PANEL = "Monitoring"
MetricsPort = Annotated[
    int | None,
    typer.Option(
        min=0, max=65535, metavar="PORT", rich_help_panel=PANEL, help="Answer /metrics, for Prometheus (0: any port)."
    ),
]
HealthPort = Annotated[
    int | None,
    typer.Option(
        min=0, max=65535, metavar="PORT", rich_help_panel=PANEL, help="Answer /healthz and /readyz (0: any port)."
    ),
]
MetricsHost = Annotated[
    str, typer.Option(metavar="ADDRESS", rich_help_panel=PANEL, help="The address of both ports; 0.0.0.0 is all.")
]
StalledAfter = Annotated[
    Any, typer.Option(rich_help_panel=PANEL, help="/healthz refuses if a loop does not go on for so long.", **DURATION)
]
LOOPBACK = "127.0.0.1"
STALLED = "3m"
"""A call of a database that does not answer ends earlier, also behind a pooler."""


@dataclass(frozen=True)
class Ports:
    """Where to answer, and when a loop counts as stalled."""

    metrics: int | None
    health: int | None
    host: str
    stalled_after: Any

    @contextmanager
    def opened(
        self,
        session: Session,
        parts: Mapping[str, Vitals],
        families: Callable[[], Any],
        *,
        ping: Callable[[], None],
        stopping: Callable[[], bool],
    ) -> Iterator[None]:
        """Answers while the block runs. `families` makes the metrics."""
        health = Health(parts, ping=ping, stopping=stopping, stalled_after=seconds(self.stalled_after))
        pages: dict[int, dict[str, Page]] = {}
        if self.metrics is not None:
            from custody.monitoring.exposition import page

            pages.setdefault(self.metrics, {})["/metrics"] = lambda: page(families)
        if self.health is not None:
            pages.setdefault(self.health, {}).update(
                {
                    "/healthz": health_page(health.require_alive, "ok"),
                    "/readyz": health_page(health.require_ready, "ready"),
                }
            )
        with ExitStack() as stack:
            for wanted, found in pages.items():
                port = stack.enter_context(answering(self.host, wanted, found))
                host = f"[{self.host}]" if ":" in self.host else self.host
                session.note(f"answers {', '.join(found)} on http://{host}:{port}")
            yield
