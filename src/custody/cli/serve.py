"""`custody serve`: the HTTP door."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from custody.cli import arguments
from custody.cli.door import door_of
from custody.cli.work import logged

_DURATION = {"parser": arguments.duration, "metavar": "DURATION"}


def serve(
    ctx: typer.Context,
    host: Annotated[str, typer.Option(help="The address to serve on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 takes a free one.")] = 8080,
    connections: Annotated[int, typer.Option(min=2, help="Connections to the database.")] = 10,
    max_body: Annotated[Any, typer.Option(parser=arguments.size, metavar="SIZE", help="The largest body.")] = "16MB",
    max_batch: Annotated[int, typer.Option(min=1, help="The most messages of one request.")] = 10_000,
    max_wait: Annotated[Any, typer.Option(help="The longest long poll.", **_DURATION)] = "60s",
    grace: Annotated[Any, typer.Option(help="How long a stop waits for requests.", **_DURATION)] = "30s",
    tls_cert: Annotated[Path | None, typer.Option(help="Serve HTTPS with this certificate (PEM).")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="The key of the certificate (PEM).")] = None,
    origin: Annotated[list[str] | None, typer.Option(help="Web pages from here may call (CORS).")] = None,
    coalesce: Annotated[bool, typer.Option("--coalesce/--no-coalesce", help="Let requests share transactions.")] = True,
) -> None:
    """Serve HTTP until SIGTERM or Ctrl-C: then it answers what it has accepted, and stops."""
    import custody
    from custody.http import Settings
    from custody.http import serve as run

    door = door_of(ctx)
    settings = Settings(
        host=host,
        port=port,
        connections=connections,
        coalesce=coalesce,
        max_body=max_body,
        max_batch=max_batch,
        max_wait=max_wait,
        grace=grace,
        tls_cert=tls_cert,
        tls_key=tls_key,
        origins=tuple(origin or ()),
    )

    def ready(url: str) -> None:
        if door.json:
            door.emit({"url": url, "database": "embedded" if door.configured_url is None else "postgresql"})
        else:
            door.say(f"Custody serves on {url} (docs at {url}/docs); SIGTERM or Ctrl-C stops")

    with (
        custody.connect(door.database, home=door.home, pool_size=connections, worker="http") as opened,
        logged(door),
    ):
        run(opened, settings, ready=ready)
