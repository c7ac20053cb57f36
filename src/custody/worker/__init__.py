"""The worker: claims, calls the handler and settles, until it is stopped."""

from custody.worker.loop import Verbs, Worker, WorkerSummary

__all__ = ["WorkerSummary", "Verbs", "Worker"]
