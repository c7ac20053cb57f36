"""`custody capture`: a message and what happened to it, as a test."""

from __future__ import annotations

import ast
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from custody.cli.session import counted, session_of


class Expect(StrEnum):
    DONE = "done"
    RECORDED = "recorded"


def capture(
    ctx: typer.Context,
    place: Annotated[str, typer.Argument(metavar="TOPIC/PARTITION/OFFSET", help="The message.")],
    group: Annotated[str | None, typer.Option("--group", "-g", help="Default: the only group that has had it.")] = None,
    handler: Annotated[
        str | None, typer.Option(metavar="MODULE:NAME", help="The handler to test, such as shop.handlers:apply.")
    ] = None,
    before: Annotated[int, typer.Option(min=0, max=1000, help="Most earlier messages of its key.")] = 10,
    expect: Annotated[
        Expect, typer.Option(help="done: fails until the handler is mended. recorded: passes while it fails as it did.")
    ] = Expect.DONE,
    redact: Annotated[
        list[str] | None, typer.Option(metavar="FIELD", help="Replace a field, such as customer.email. Repeatable.")
    ] = None,
    redact_header: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Replace a header.")] = None,
    redact_key: Annotated[bool, typer.Option("--redact-key", help="Replace the key.")] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write to this file, not to stdout.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
) -> None:
    """Write a message, what came before it in its key, and its attempts as a test for pytest.

    The test delivers it again on a fresh embedded database, with the clock at the recorded times.
    """
    from custody.testing.capture import written
    from custody.testing.incident import incident_of
    from custody.testing.redaction import redacted

    session = session_of(ctx)
    topic, partition, offset = _parts(place)
    if output is not None and output.exists() and not force:
        raise typer.BadParameter(f"{output} exists: give another --output, or --force to overwrite it")
    with session.connect() as c:
        incident = incident_of(c, topic, partition, offset, group=group, before=before)
    incident = redacted(incident, fields=redact or (), headers=redact_header or (), key=redact_key)
    source = written(incident, handler=handler, expected=expect.value)
    ast.parse(source)  # nothing is written that Python could not read
    attempts, earlier = len(incident.attempts), len(incident.before)
    found = {"topic": topic, "partition": partition, "offset": offset, "group": incident.group}
    if output is not None:
        output.write_text(source, encoding="utf-8")
        session.say(f"{output}: {counted(attempts, 'attempt')}, {counted(earlier, 'earlier message')} of its key")
    if session.json:
        where = {"output": str(output)} if output is not None else {"source": source}
        session.emit({**found, "attempts": attempts, "before": earlier, **where})
    elif output is None:
        print(source, end="")


def _parts(place: str) -> tuple[str, int, int]:
    topic, _, rest = place.partition("/")
    partition, _, offset = rest.partition("/")
    if not topic or not partition.isdecimal() or not offset.isdecimal():
        raise typer.BadParameter(f"{place!r} is not TOPIC/PARTITION/OFFSET, such as orders/0/42")
    return topic, int(partition), int(offset)
