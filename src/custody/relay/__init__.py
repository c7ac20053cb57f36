"""The relay: publishes the events of an outbox to their destinations, at least once, in the order of their keys."""

from custody.relay.custody_publisher import CustodyPublisher
from custody.relay.loop import Relay, RelaySummary
from custody.relay.publisher import ClaimedEvent, FunctionPublisher, Publisher, StdoutPublisher
from custody.relay.webhook import WebhookPublisher, signature

__all__ = [
    "Relay",
    "RelaySummary",
    "Publisher",
    "ClaimedEvent",
    "FunctionPublisher",
    "StdoutPublisher",
    "WebhookPublisher",
    "CustodyPublisher",
    "signature",
]
