"""`custody ui`: the dashboard of a database, on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from custody.cli.session import session_of
from custody.model.server_settings import ServerSettings

PORT = 8090
"""Beside that of `custody serve`, which may run too."""


def ui(
    ctx: typer.Context,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = PORT,
) -> None:
    """Open the dashboard of a database for a browser on this machine. Ctrl-C ends it.

    It serves what `custody serve` does, on 127.0.0.1.
    """
    import custody
    from custody.http import serve
    from custody.http.logs import written
    from custody.http.threads import SPARE

    session = session_of(ctx)
    settings = ServerSettings(port=port, connections=4)

    def ready(url: str) -> None:
        if session.json:
            session.emit({"url": f"{url}/ui"})
        else:
            session.say(f"The dashboard is at {url}/ui; Ctrl-C ends it")

    with (
        written("text", "warning"),
        custody.connect(
            session.database,
            home=session.home,
            pool_size=settings.connections + SPARE,
            statement_timeout="30s",
            listen_url=session.listen_url,
            worker="http",
        ) as opened,
    ):
        _ = opened.database_url  # raises if --database is a server, which has the dashboard itself
        serve(opened, settings, ready=ready)
