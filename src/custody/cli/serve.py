"""`custody serve`: the HTTP server."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from custody.cli.arguments import DURATION, SIZE
from custody.cli.exporting import export_spans
from custody.cli.session import session_of


def serve(
    ctx: typer.Context,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8080,
    connections: Annotated[int, typer.Option(min=2, help="Number of connections to the database.")] = 10,
    max_body: Annotated[Any, typer.Option(help="Largest body of a request.", **SIZE)] = "16MB",
    max_batch: Annotated[int, typer.Option(min=1, help="Most messages of one request or lease.")] = 10_000,
    max_wait: Annotated[Any, typer.Option(help="Longest long poll.", **DURATION)] = "60s",
    body_timeout: Annotated[Any, typer.Option(help="Timeout for receiving a request.", **DURATION)] = "30s",
    write_timeout: Annotated[Any, typer.Option(help="Timeout for a client to read its answer.", **DURATION)] = "30s",
    max_connections: Annotated[int, typer.Option(min=1, help="Most client connections.")] = 10_000,
    max_connections_per_address: Annotated[
        int, typer.Option(min=1, help="Most client connections from one address.")
    ] = 5_000,
    max_buffered: Annotated[
        Any,
        typer.Option(help="Most memory for bodies, and as much again for answers.", **SIZE),
    ] = "256MB",
    statement_timeout: Annotated[Any, typer.Option(help="Timeout of a database call.", **DURATION)] = "30s",
    grace: Annotated[Any, typer.Option(help="How long a stop waits for accepted requests.", **DURATION)] = "30s",
    open: Annotated[
        bool, typer.Option("--open", help="Serve without API keys even though all existing keys are revoked.")
    ] = False,
    tls_cert: Annotated[Path | None, typer.Option(help="Serve HTTPS with this certificate (PEM).")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Private key of the certificate (PEM).")] = None,
    origin: Annotated[
        list[str] | None, typer.Option(help="Allow calls from web pages of this origin (CORS); may be repeated.")
    ] = None,
    log: Annotated[
        str | None,
        typer.Option(metavar="json|text|none", help="Format of the log on stderr (default: text on a terminal)."),
    ] = None,
    coalesce: Annotated[
        bool, typer.Option("--coalesce/--no-coalesce", help="Small requests share transactions.")
    ] = True,
) -> None:
    """Run the HTTP server. SIGTERM or Ctrl-C stops it after the accepted requests are answered."""
    import custody
    from custody.http import Settings
    from custody.http import serve as run
    from custody.http.logs import FORMATS, format_for, written
    from custody.http.threads import SPARE

    session = session_of(ctx)
    usual = "none" if session.quiet else format_for(sys.stderr)
    kind = next((known for known in FORMATS if known == (log or usual)), None)
    if kind is None:
        raise typer.BadParameter(f"--log cannot be {log!r}; it is one of: {', '.join(FORMATS)}")
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
        _ = opened.database_url  # raises if --database is a server: it cannot be served again
        export_spans()
        run(opened, settings, ready=ready)
