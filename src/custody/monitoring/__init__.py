"""Health and metrics of workers, relays and pipelines, on ports of their own. `custody serve` has its own routes."""

from custody.monitoring.health import Health
from custody.monitoring.listening import answering

__all__ = ["Health", "answering"]
