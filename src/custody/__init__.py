"""Custody: a durable message log in which every message has a lifecycle."""

from custody.claim import Lease
from custody.engine import Custody, connect, migrate
from custody.errors import CustodyError, LeaseLost
from custody.model import DeadLetter, Message, Outgoing, Receipt, Stats
from custody.policy import Constant, Exponential, Linear, Policy
from custody.settle import Outcome

__all__ = [
    "connect",
    "migrate",
    "Custody",
    "Policy",
    "Exponential",
    "Linear",
    "Constant",
    "Outgoing",
    "Receipt",
    "Message",
    "Lease",
    "Outcome",
    "DeadLetter",
    "Stats",
    "CustodyError",
    "LeaseLost",
]
