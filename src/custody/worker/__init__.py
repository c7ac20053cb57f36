"""The worker: claim → handler → settle, until it is stopped."""

from custody.worker.loop import Summary, Verbs, Worker

__all__ = ["Summary", "Verbs", "Worker"]
