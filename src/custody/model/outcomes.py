"""What can become of a delivered message. `OUTCOMES` has a line for each outcome; interfaces and figures follow it.

By hand stay the step that makes it, in the SQL function `settle`, and the exception or method by which users say it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Literal

from custody.errors import PayloadMismatch
from custody.model.policy import Duration, seconds
from custody.model.tracebacks import last_lines

Kind = Literal["ack", "nack", "dead", "reject", "later", "skip", "release"]


@dataclass(frozen=True)
class OutcomeKind:
    """What an outcome means, in words and for those who act on it."""

    effect: str
    """What the message is then, for people."""
    entry: str
    """The kind of journal entry that it leaves (see `lifecycle.JOURNAL`)."""
    counted: str
    """The field of `Counts` that it is added to."""
    lease: str = field(default="", kw_only=True)
    """How the holder of a lease says it."""
    raised: str = field(default="", kw_only=True)
    """What a handler raises to say it."""
    failure: bool = field(default=False, kw_only=True)
    resolves: Literal["yes", "no", "unless held"] = field(default="no", kw_only=True)
    """Whether its key goes on: for a dead message that depends on the policy's `on_dead`."""


OUTCOMES: dict[Kind, OutcomeKind] = {
    "ack": OutcomeKind("done", "ack", "done", lease="`ack()`", resolves="yes"),
    "nack": OutcomeKind(
        "failed: retried by the policy, or after a delay; dead at the policy's limit",
        "nack",
        "failed",
        lease="`nack(error=…, delay=…)`",
        raised="any exception, or `Retry(…, after=…)`",
        failure=True,
    ),
    "dead": OutcomeKind("dead", "dead", "dead", raised="`Dead(…)`", failure=True, resolves="unless held"),
    "reject": OutcomeKind("dead", "dead", "dead", lease="`nack(requeue=False)`", failure=True, resolves="unless held"),
    "later": OutcomeKind(
        "ready again after that time; costs no attempt",
        "later",
        "later",
        lease="`later(after=…)`",
        raised="`Later(…)`",
    ),
    "skip": OutcomeKind(
        "skipped: not needed, counts as done",
        "skip",
        "skipped",
        lease="`skip(reason=…)`",
        raised="`Skip(…)`",
        resolves="yes",
    ),
    "release": OutcomeKind("ready again at once; costs no attempt", "release", "released", lease="`release()`"),
}


@dataclass(frozen=True, kw_only=True)
class Counts:
    """How many messages came to what. `lost`: the outcome came after their lease had expired, and was refused."""

    done: int = 0
    failed: int = 0
    dead: int = 0
    later: int = field(default=0, metadata={"words": "postponed"})
    skipped: int = 0
    released: int = 0
    lost: int = 0

    def in_words(self, **words: str) -> str:
        """All of them on one line; `words` replaces those of a count."""
        said = {one.name: words.get(one.name, one.metadata.get("words", one.name)) for one in fields(Counts)}
        return ", ".join(f"{getattr(self, name):,} {word}" for name, word in said.items())


@dataclass(frozen=True)
class Outcome:
    """The outcome of one message."""

    kind: Kind
    error: str | None = field(default=None, kw_only=True)
    delay: Duration | None = field(default=None, kw_only=True)
    traceback: str | None = field(default=None, kw_only=True)
    """Of a failure: the end of its traceback, which is kept with the message."""

    def __post_init__(self) -> None:
        if self.delay is not None:
            seconds(self.delay)

    def stops_key(self, on_dead: Literal["release", "hold"]) -> bool:
        """Whether the later messages of its key leave the lease with it."""
        resolves = OUTCOMES[self.kind].resolves
        return resolves == "no" or (resolves == "unless held" and on_dead == "hold")


class Decision(Exception):
    """By raising one of these a handler decides itself what becomes of its message."""

    def outcome(self) -> Outcome:
        raise NotImplementedError


class Retry(Decision):
    """A failure: tried again after this time instead of the policy's backoff, dead at max_attempts."""

    def __init__(self, reason: str = "the handler asked for a retry", *, after: Duration | None = None) -> None:
        super().__init__(reason)
        if after is not None:
            seconds(after)
        self.after = after

    def outcome(self) -> Outcome:
        return Outcome("nack", error=_text(self), delay=self.after)


class Dead(Decision):
    """No retry will help: dead now, with this reason."""

    def outcome(self) -> Outcome:
        return Outcome("dead", error=_text(self) or "given up by the handler")


class Later(Decision):
    """Not now: delivered again after this time; costs nothing."""

    def __init__(self, after: Duration, reason: str | None = None) -> None:
        super().__init__(reason or f"postponed by {after}")
        seconds(after)
        self.after = after
        self.reason = reason

    def outcome(self) -> Outcome:
        return Outcome("later", error=self.reason, delay=self.after)


class Skip(Decision):
    """Not needed, for this reason: counts as done, and its key goes on."""

    def outcome(self) -> Outcome:
        return Outcome("skip", error=_text(self) or None)


def outcome_of(error: BaseException | None) -> Outcome:
    """The outcome of a handler that returned (None) or raised."""
    if error is None:
        return Outcome("ack")
    if isinstance(error, Decision):
        outcome = error.outcome()
        return replace(outcome, traceback=last_lines(error.__cause__)) if error.__cause__ is not None else outcome
    if isinstance(error, PayloadMismatch):  # it would not fit the next time either
        return Outcome("dead", error=_text(error))
    return failure(error)


def failure(error: BaseException) -> Outcome:
    """A message that failed with this error."""
    text = _text(error)
    named = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return Outcome("nack", error=named, traceback=last_lines(error))


def _text(error: BaseException) -> str:
    """The text of an error, even if its `__str__` raises."""
    try:
        return str(error)
    except Exception as another:
        return f"(str() of the error raised {type(another).__name__})"
