"""Verbs for many callers at once, used by a server: one transaction and one fsync for all, an answer for each."""

from custody.coalesced.acks import Ack, ack_each
from custody.coalesced.blocking import BLOCKED
from custody.coalesced.claims import Claim, claim_each
from custody.coalesced.publishes import Placed, Publish, Publishes

__all__ = ["Publish", "Publishes", "Placed", "Ack", "ack_each", "Claim", "claim_each", "BLOCKED"]
