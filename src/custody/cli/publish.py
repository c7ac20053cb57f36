"""`custody publish`: publishes arguments, a file or stdin in batches. After a stop it prints how many it published."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import datetime
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from custody.cli import arguments, render
from custody.cli.arguments import DURATION, Topic
from custody.cli.failures import INTERRUPTED
from custody.cli.intake import Reading, batches
from custody.cli.session import Session, counted, session_of, single
from custody.errors import CustodyError, DatabaseUnavailable
from custody.model.entities import Delayed, Outgoing, Receipt
from custody.model.lanes import Priority

if TYPE_CHECKING:
    from custody import Custody

BATCH = 1000


@dataclass
class Published:
    """What was published so far: a count and, for each partition, the offsets."""

    topic: str
    count: int = 0
    partitions: dict[int, list[int]] = field(default_factory=dict)
    delayed: list[Delayed] = field(default_factory=list)
    interrupted: bool = False

    def send(self, c: Custody, messages: list[Outgoing]) -> None:
        """Publishes a batch in order, with a call for each run of delayed or of other messages."""
        for waits, some in groupby(messages, key=lambda message: message.delayed):
            if waits:
                self.delayed += c.publish_delayed(self.topic, some)
            else:
                self.add(c.publish_many(self.topic, some))

    def add(self, receipts: Sequence[Receipt]) -> None:
        self.count += len(receipts)
        for receipt in receipts:
            seen = self.partitions.setdefault(receipt.partition, [0, receipt.offset, receipt.offset])
            seen[0] += 1
            seen[2] = receipt.offset

    def document(self) -> dict[str, Any]:
        return {
            "topic": self.topic,
            "published": self.count,
            "delayed": [{"delay_id": later.delay_id, "deliver_at": later.deliver_at} for later in self.delayed],
            "interrupted": self.interrupted,
            "partitions": [
                {"partition": partition, "published": count, "first_offset": first, "last_offset": last}
                for partition, (count, first, last) in sorted(self.partitions.items())
            ],
        }

    def sentence(self) -> str:
        where = ""
        if self.count == 1:
            partition, (_, offset, _) = next(iter(self.partitions.items()))
            where = f"/{partition}/{offset}"
        if self.delayed:
            later = f"{counted(len(self.delayed), 'message')} of {self.topic} delayed"
            if len(self.delayed) == 1:
                (one,) = self.delayed
                later = f"1 message of {self.topic} delayed until {one.deliver_at:%FT%TZ} (delay id {one.delay_id})"
            return later if not self.count else f"published {counted(self.count, 'message')}; {later}"
        return f"published {counted(self.count, 'message')} to {self.topic}{where}"


class Stop:
    """Turns Ctrl-C and SIGTERM into a stop between two batches, so that the count of published messages is exact."""

    def __init__(self) -> None:
        self.asked = False
        self._busy = False

    def __call__(self, _number: int, _frame: FrameType | None) -> None:
        if self.asked or not self._busy:
            raise KeyboardInterrupt
        self.asked = True

    @contextmanager
    def held(self) -> Iterator[None]:
        """A stop waits while a batch is published. A second signal does not wait."""
        self._busy = True
        try:
            yield
        finally:
            self._busy = False
        if self.asked:
            raise KeyboardInterrupt

    @contextmanager
    def listening(self) -> Iterator[None]:
        before = {number: signal.signal(number, self) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def publish(
    ctx: typer.Context,
    topic: Topic,
    payloads: Annotated[
        list[str] | None, typer.Argument(metavar="[PAYLOAD]…", help="JSON values. Default: the lines of stdin.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="Read lines from this file.", exists=True, dir_okay=False)
    ] = None,
    key: Annotated[str | None, typer.Option("--key", "-k", help="Key of every message without one.")] = None,
    key_field: Annotated[
        str | None, typer.Option(metavar="NAME", help="Take the key from this field of the JSON object.")
    ] = None,
    header: Annotated[
        list[Any] | None,
        typer.Option(
            "--header", "-H", parser=arguments.header, metavar="NAME=VALUE", help="A header of every message."
        ),
    ] = None,
    partition: Annotated[int | None, typer.Option(min=0, help="Publish to this partition.")] = None,
    delay: Annotated[str | None, typer.Option(help="Deliver after this time.", **DURATION)] = None,
    deliver_at: Annotated[
        datetime | None, typer.Option(parser=arguments.moment, metavar="TIME", help="Deliver at this time.")
    ] = None,
    priority: Annotated[
        Priority | None, typer.Option(help="Priority, on a topic with priorities (default: normal).")
    ] = None,
    routing_key: Annotated[
        str | None, typer.Option(metavar="KEY", help="Routing key, such as orders.eu.created; groups bind to it.")
    ] = None,
    allow_split: Annotated[
        bool,
        typer.Option("--allow-split", help="Allow a --partition other than the key's own; the key then has no order."),
    ] = False,
    text: Annotated[bool, typer.Option("--text", help="Each payload is text, not JSON.")] = False,
    as_bytes: Annotated[bool, typer.Option("--bytes", help="Each payload is bytes, not JSON.")] = False,
    envelope: Annotated[
        bool, typer.Option("--envelope", help="Each value is an object with payload, key, headers …")
    ] = False,
) -> int | None:
    """Publish messages from arguments, a file or stdin, with one JSON value on each line."""
    session = session_of(ctx)
    single(text=text, bytes=as_bytes, envelope=envelope)
    single(file=file, payload=payloads)
    single(delay=delay, deliver_at=deliver_at)
    if key_field and (text or as_bytes):
        raise typer.BadParameter("--key-field needs JSON payloads")
    form = "text" if text else "bytes" if as_bytes else "envelope" if envelope else "json"
    reading = Reading(
        form=form,  # type: ignore[arg-type]  # one of the four
        key=key,
        key_field=key_field,
        headers=dict(header or []) or None,
        partition=partition,
        delay=delay,
        deliver_at=deliver_at,
        priority=priority,
        routing_key=routing_key,
        allow_split=allow_split,
    )
    done = _publish(session, topic, reading, payloads, file)
    if session.json:
        session.emit(done.document())
    elif done.interrupted:
        print(done.sentence(), file=sys.stderr)
    else:
        session.say(done.sentence())
    return INTERRUPTED if done.interrupted else None


def _publish(
    session: Session, topic: str, reading: Reading, payloads: list[str] | None, file: Path | None
) -> Published:
    """Publishes the arguments, or lines until their end or a stop. On a failure it prints how many it published."""
    done, stop = Published(topic), Stop()
    with session.connect() as c, stop.listening():
        try:
            if payloads:
                given = [reading.message(os.fsencode(text), f"payload {n}") for n, text in enumerate(payloads, 1)]
                with stop.held():
                    done.send(c, given)
            else:
                c.topic(topic)  # refuses an unknown topic before anything is read
                _publish_lines(c, session, reading, file, done, stop)
        except KeyboardInterrupt:
            done.interrupted = True
        except CustodyError as error:
            if done.count or done.delayed:
                more = " at least" if isinstance(error, DatabaseUnavailable) else ""
                session.note(
                    f"{counted(done.count + len(done.delayed), 'message')}{more} had been published before this:"
                )
            raise
    return done


def _publish_lines(
    c: Custody, session: Session, reading: Reading, file: Path | None, done: Published, stop: Stop
) -> None:
    if file is None and sys.stdin.isatty():
        session.note("enter one message on each line; Ctrl-D ends")
    with (
        nullcontext(sys.stdin) if file is None else file.open("rb") as source,
        _progress(session, None if file is None else file.stat().st_size) as advance,
    ):
        for lines in batches(source.fileno(), BATCH):
            messages: list[Outgoing] = reading.messages(lines)
            with stop.held():
                done.send(c, messages)
            advance(sum(len(line) + 1 for _, line in lines), done.count)


@contextmanager
def _progress(session: Session, size: int | None) -> Iterator[Any]:
    """A progress bar on stderr. Yields a function that takes the bytes read since the last call and the total count."""
    if not session.progresses() or (size is None and sys.stdin.isatty()):
        yield lambda _read, _count: None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = [BarColumn(), TextColumn("{task.fields[count]:,} messages"), TimeElapsedColumn()]
    if size is not None:
        columns.append(TimeRemainingColumn())
    with Progress(*columns, console=render.console(color=session.color, stderr=True), transient=True) as progress:
        task = progress.add_task("publishing", total=size, count=0)
        yield lambda read, count: progress.update(task, advance=read, count=count)
