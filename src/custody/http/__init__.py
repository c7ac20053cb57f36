"""The HTTP interface: `custody serve`. It parses requests, calls the engine and renders answers. It adds two things:
many callers share a transaction, and a long poll needs neither a thread nor a connection while it waits."""

from custody import extras
from custody.model.server_settings import ServerSettings

with extras.named():
    from custody.http.serving import Server, serve

__all__ = ["Server", "ServerSettings", "serve"]
