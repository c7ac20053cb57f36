"""`custody serve`: the HTTP server."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from custody.cli import arguments
from custody.cli.exporting import export_spans
from custody.cli.session import session_of

_DURATION = {"parser": arguments.duration, "metavar": "DURATION"}


def serve(
    ctx: typer.Context,
    host: Annotated[str, typer.Option(help="The address to serve on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 takes a free one.")] = 8080,
    connections: Annotated[int, typer.Option(min=2, help="Connections to the database.")] = 10,
    max_body: Annotated[Any, typer.Option(parser=arguments.size, metavar="SIZE", help="The largest body.")] = "16MB",
    max_batch: Annotated[int, typer.Option(min=1, help="The most messages of one request or lease.")] = 10_000,
    max_wait: Annotated[Any, typer.Option(help="The longest long poll.", **_DURATION)] = "60s",
    body_timeout: Annotated[Any, typer.Option(help="How long a request may take to come.", **_DURATION)] = "30s",
    write_timeout: Annotated[
        Any, typer.Option(help="How long a client may leave its answer unread.", **_DURATION)
    ] = "30s",
    max_connections: Annotated[int, typer.Option(min=1, help="The most connections of clients.")] = 10_000,
    max_connections_per_address: Annotated[
        int, typer.Option(min=1, help="The most connections from one address.")
    ] = 5_000,
    max_buffered: Annotated[
        Any, typer.Option(parser=arguments.size, metavar="SIZE", help="The most memory for bodies, and for answers.")
    ] = "256MB",
    statement_timeout: Annotated[Any, typer.Option(help="How long a database call may take.", **_DURATION)] = "30s",
    grace: Annotated[Any, typer.Option(help="How long a stop waits for requests.", **_DURATION)] = "30s",
    open: Annotated[
        bool, typer.Option("--open", help="Serve without API keys, although there were keys and all are revoked.")
    ] = False,
    tls_cert: Annotated[Path | None, typer.Option(help="Serve HTTPS with this certificate (PEM).")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="The key of the certificate (PEM).")] = None,
    origin: Annotated[list[str] | None, typer.Option(help="Web pages from here may call (CORS).")] = None,
    log: Annotated[
        str | None, typer.Option(metavar="json|text|none", help="Lines on stderr (default: text on a terminal).")
    ] = None,
    coalesce: Annotated[bool, typer.Option("--coalesce/--no-coalesce", help="Let requests share transactions.")] = True,
) -> None:
    """Serve HTTP until SIGTERM or Ctrl-C: then it answers what it has accepted, and stops."""
    import custody
    from custody.http import Settings
    from custody.http import serve as run
    from custody.http.logs import FORMATS, format_for, written
    from custody.http.threads import SPARE

    session = session_of(ctx)
    usual = "none" if session.quiet else format_for(sys.stderr)
    kind = next((known for known in FORMATS if known == (log or usual)), None)
    if kind is None:
        raise typer.BadParameter(f"--log cannot be {log!r}: it is {', '.join(FORMATS)}")
    settings = Settings(
        host=host,
        port=port,
        connections=connections,
        coalesce=coalesce,
        max_body=max_body,
        max_batch=max_batch,
        max_wait=max_wait,
        body_timeout=body_timeout,
        write_timeout=write_timeout,
        max_connections=max_connections,
        max_connections_per_address=max_connections_per_address,
        max_buffered=max_buffered,
        grace=grace,
        open=open,
        tls_cert=tls_cert,
        tls_key=tls_key,
        origins=tuple(origin or ()),
    )

    def ready(url: str) -> None:
        if session.json:
            session.emit({"url": url, "database": "embedded" if session.configured_url is None else "postgresql"})
        else:
            session.say(f"Custody serves on {url} (docs at {url}/docs); SIGTERM or Ctrl-C stops")

    with (
        written(kind),
        custody.connect(
            session.database,
            home=session.home,
            pool_size=connections + SPARE,
            statement_timeout=statement_timeout,
            listen_url=session.listen_url,
            worker="http",
        ) as opened,
    ):
        _ = opened.database_url  # refuses to serve what is served already
        export_spans()
        run(opened, settings, ready=ready)
