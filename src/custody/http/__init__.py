"""The HTTP interface: `custody serve`. Thin: it parses, calls the engine and renders. What it adds: many callers share
a transaction, and waiting costs neither a thread nor a connection."""

from custody.http.serving import Server, Settings, serve

__all__ = ["Server", "Settings", "serve"]
