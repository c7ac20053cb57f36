"""`custody consume`: claims, prints and acks messages. Those that could not be printed are released."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Annotated

import typer

from custody.cli import render
from custody.cli.arguments import Group, Partition, Topic, VisibilityTimeout
from custody.cli.session import Session, counted, session_of, single
from custody.elapsed import elapsed, holds_until
from custody.errors import CustodyError, LeaseLost
from custody.model.entities import Message
from custody.model.plain import to_json
from custody.model.policy import seconds

if TYPE_CHECKING:
    from custody import Custody, Lease

BATCH = 100
POLL = 1.0


def consume(
    ctx: typer.Context,
    topic: Topic,
    group: Group,
    most: Annotated[int | None, typer.Option("--max", "-n", min=1, help="Stop after this many messages.")] = None,
    no_ack: Annotated[
        bool, typer.Option("--no-ack", help="Only print: release all messages, without a delivery counted.")
    ] = False,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Wait for more, until Ctrl-C.")] = False,
    partition: Partition = None,
    visibility_timeout: VisibilityTimeout = None,
) -> None:
    """Claim the messages that are due, print one on each line, and ack them."""
    session = session_of(ctx)
    single(no_ack=no_ack, follow=follow)
    with session.connect() as c, _terminated_as_interrupt():
        policy = c.group(topic, group).policy
        if policy is None:
            count = _read_bare(c, session, topic, group, partition, most, commit=not no_ack, follow=follow)
        else:
            visibility = seconds(visibility_timeout or policy.visibility_timeout)
            taking = _Taking(c, session, topic, group, most=most, partition=partition, visibility=visibility)
            count = taking.run(keep=not no_ack, follow=follow)
    if not session.json:
        session.note(f"{counted(count, 'message')} {'printed and released' if no_ack else 'consumed'}")


class _Taking:
    """One run over a group with a lifecycle."""

    def __init__(
        self,
        c: Custody,
        session: Session,
        topic: str,
        group: str,
        *,
        most: int | None,
        partition: int | None,
        visibility: float,
    ) -> None:
        self._c, self._session, self._topic, self._group = c, session, topic, group
        self._most, self._partition, self._visibility = most, partition, visibility
        self._printed: Lease | None = None
        self._looked_at: list[Lease] = []

    def run(self, *, keep: bool, follow: bool) -> int:
        count = 0
        try:
            with _woken(self._c, self._topic, follow=follow) as wait:
                while self._most is None or count < self._most:
                    sent = elapsed()
                    lease = self._claim(BATCH if self._most is None else min(BATCH, self._most - count))
                    if lease and elapsed() >= holds_until(sent, self._visibility):
                        _give_back(lease)  # this process was suspended or cut off, so another one may have the messages
                    elif lease:
                        count += self._print(lease, keep=keep)
                    elif lease.reason != "busy" and not follow:
                        if lease.reason != "empty":
                            self._session.note(
                                f"stopped: {lease.reason}" + (f" ({lease.detail})" if lease.detail else "")
                            )
                        break
                    else:
                        wait(self._c.next_due(self._topic, self._group), lease.reason)
        finally:
            if self._printed is not None:
                self._ack(self._printed)
            for lease in self._looked_at:
                _give_back(lease)
        return count

    def _claim(self, count: int) -> Lease:
        """Acks what was printed, and claims the next messages."""
        lease = self._c.claim(
            self._topic,
            self._group,
            max_messages=count,
            partition=self._partition,
            visibility_timeout=self._visibility,
            settle=self._printed,
        )
        self._printed = None
        if lease.lost is not None:
            self._note_lost(lease.lost)
        return lease

    def _ack(self, lease: Lease) -> None:
        try:
            lease.ack()
        except LeaseLost as error:
            self._note_lost(error)

    def _note_lost(self, error: LeaseLost) -> None:
        self._session.note(f"printed, but will be delivered again: {error.message}")

    def _print(self, lease: Lease, *, keep: bool) -> int:
        """Prints first, the ack follows: a message may be printed twice, but none is done without being printed."""
        try:
            _print(self._session, lease)
        except BaseException:
            _give_back(lease)
            raise
        if keep:
            self._printed = lease
        else:
            self._looked_at.append(lease)
        return len(lease)


def _give_back(lease: Lease) -> None:
    with suppress(CustodyError):  # after an expiry its messages are ready again anyway
        lease.release()


def _print(session: Session, messages: Iterable[Message]) -> None:
    lines = [to_json(message) if session.json else render.message(message) for message in messages]
    print("\n".join(lines), flush=True)


def _read_bare(
    c: Custody,
    session: Session,
    topic: str,
    group: str,
    partition: int | None,
    most: int | None,
    *,
    commit: bool,
    follow: bool,
) -> int:
    """Reads a bare group from its committed offsets on. Without a commit it prints one batch of each partition."""
    partitions = range(c.topic(topic).partitions) if partition is None else [partition]
    count = 0
    with _woken(c, topic, follow=follow) as wait:
        while True:
            before = count
            for number in partitions:
                size = BATCH if most is None else min(BATCH, most - count)
                messages = c.fetch(topic, group, number, max_messages=size) if size else []
                if messages:
                    _print(session, messages)
                    count += len(messages)
                    if commit:
                        c.commit(topic, group, number, messages[-1].offset + 1)
            if not commit or count == most:
                return count
            if count == before:
                if not follow:
                    return count
                wait(None, "empty")


@contextmanager
def _woken(c: Custody, topic: str, *, follow: bool) -> Iterator[Callable[[float | None, str | None], None]]:
    """A wait that a publish ends early. It lasts a second at most, because a notification may be missed."""
    wake = threading.Event()
    end = c.listen(topic, wake.set) if follow else None

    def wait(due: float | None, reason: str | None) -> None:
        longest = 0.01 if reason == "busy" else POLL
        wake.wait(longest if due is None else max(0.005, min(longest, due)))
        wake.clear()

    try:
        yield wait
    finally:
        if end is not None:
            end()


@contextmanager
def _terminated_as_interrupt() -> Iterator[None]:
    """SIGTERM ends the command as Ctrl-C does: it releases its leases first."""

    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
