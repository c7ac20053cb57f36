"""`custody serve`: the HTTP server."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from custody.cli.arguments import DURATION
from custody.cli.exporting import export_spans
from custody.cli.logs import Format, Level, LogFormat, LogLevel
from custody.cli.session import session_of
from custody.cli.settings import SettingOptions
from custody.model.server_settings import ServerSettings


@SettingOptions(ServerSettings, without=("origins",), none=False, defaults=True)
def serve(
    ctx: typer.Context,
    statement_timeout: Annotated[Any, typer.Option(help="Timeout of a database call.", **DURATION)] = "30s",
    origin: Annotated[
        list[str] | None, typer.Option(help="Allow calls from web pages of this origin (CORS); may be repeated.")
    ] = None,
    log_level: LogLevel = Level.INFO,
    log_format: LogFormat = Format.TEXT,
    *,
    given: dict[str, Any],
) -> None:
    """Run the HTTP server. SIGTERM or Ctrl-C stops it after the accepted requests are answered."""
    import custody
    from custody.http import serve as run
    from custody.http.logs import written
    from custody.http.threads import SPARE

    session = session_of(ctx)
    if session.quiet and log_level is Level.INFO:
        log_level = Level.WARNING
    settings = ServerSettings(**given, origins=tuple(origin or ()))

    def ready(url: str) -> None:
        if session.json:
            session.emit({"url": url, "database": "embedded" if session.configured_url is None else "postgresql"})
        else:
            session.say(f"Custody serves on {url} (docs at {url}/docs); SIGTERM or Ctrl-C stops")

    with (
        written("json" if log_format is Format.JSON else "text", log_level),
        custody.connect(
            session.database,
            home=session.home,
            pool_size=settings.connections + SPARE,
            statement_timeout=statement_timeout,
            listen_url=session.listen_url,
            worker="http",
        ) as opened,
    ):
        _ = opened.database_url  # raises if --database is a server: it cannot be served again
        export_spans()
        run(opened, settings, ready=ready)
