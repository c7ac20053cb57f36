"""What a handler may say of a message: return is done, any exception is a failure, and three exceptions say more."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from custody.model.policy import Duration, seconds

Kind = Literal["ack", "nack", "dead", "reject", "later", "release"]
"""dead: the handler gave it up (terminal); reject: a nack that asked for no retry."""


@dataclass(frozen=True)
class Outcome:
    """What became of one message."""

    kind: Kind
    error: str | None = field(default=None, kw_only=True)
    delay: Duration | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.delay is not None:
            seconds(self.delay)

    def stops_key(self, on_dead: Literal["release", "hold"]) -> bool:
        """Whether the later messages of its key leave the lease with it: all but what resolves the message."""
        return self.kind != "ack" and not (self.kind in ("dead", "reject") and on_dead == "release")


class Retry(Exception):
    """A failure: tried again after this time instead of the policy's backoff, dead at max_attempts."""

    def __init__(self, reason: str = "the handler asked for a retry", *, after: Duration | None = None) -> None:
        super().__init__(reason)
        if after is not None:
            seconds(after)
        self.after = after


class Dead(Exception):
    """No retry will help: dead now, with this reason."""


class Later(Exception):
    """Not now: delivered again after this time; costs nothing."""

    def __init__(self, after: Duration, reason: str | None = None) -> None:
        super().__init__(reason or f"put off by {after}")
        seconds(after)
        self.after = after
        self.reason = reason


def outcome_of(error: BaseException | None) -> Outcome:
    """The outcome of a handler that returned (None) or raised."""
    if error is None:
        return Outcome("ack")
    if isinstance(error, Later):
        return Outcome("later", error=error.reason, delay=error.after)
    if isinstance(error, Dead):
        return Outcome("dead", error=_text(error) or "given up by the handler")
    if isinstance(error, Retry):
        return Outcome("nack", error=_text(error), delay=error.after)
    text = _text(error)
    return Outcome("nack", error=f"{type(error).__name__}: {text}" if text else type(error).__name__)


def _text(error: BaseException) -> str:
    """What an error says, if its own code can tell."""
    try:
        return str(error)
    except Exception as another:
        return f"(its text could not be made: {type(another).__name__})"
