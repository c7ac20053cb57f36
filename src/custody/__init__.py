"""Custody: a durable message log in which every message has a lifecycle."""

from custody import outbox as outbox
from custody import relay as relay
from custody.claim import Lease
from custody.engine import Custody
from custody.errors import CustodyError, LeaseLost
from custody.model import DeadLetter, Delayed, Message, Outgoing, Receipt, Stats
from custody.once import forget_once, once
from custody.opening import connect, migrate
from custody.outcomes import Dead, Later, Outcome, Retry
from custody.policy import Breaker, Constant, Exponential, Linear, Policy
from custody.retention import Retention
from custody.routing import Binding

__all__ = [
    "connect",
    "migrate",
    "Custody",
    "Policy",
    "Exponential",
    "Linear",
    "Constant",
    "Breaker",
    "Binding",
    "Retention",
    "Outgoing",
    "Receipt",
    "Delayed",
    "Message",
    "Lease",
    "once",
    "forget_once",
    "Outcome",
    "Retry",
    "Later",
    "Dead",
    "DeadLetter",
    "Stats",
    "CustodyError",
    "LeaseLost",
]
