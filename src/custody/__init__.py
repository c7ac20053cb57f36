"""Custody: a durable message log in which every message has a lifecycle."""

from custody import outbox as outbox
from custody import relay as relay
from custody.app import App
from custody.connection import connect, migrate
from custody.engine import Custody
from custody.errors import CustodyError, LeaseLost
from custody.handlers import handler
from custody.model.entities import DeadLetter, Delayed, Message, Outgoing, Receipt, Stats
from custody.model.outcomes import Dead, Later, Outcome, Retry, Skip
from custody.model.policy import Breaker, Constant, Exponential, Linear, Policy
from custody.model.retention import Retention
from custody.model.routing import Binding
from custody.verbs.claim import Lease
from custody.verbs.once import forget_once, once

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
    "handler",
    "App",
    "once",
    "forget_once",
    "Outcome",
    "Retry",
    "Skip",
    "Later",
    "Dead",
    "DeadLetter",
    "Stats",
    "CustodyError",
    "LeaseLost",
]
