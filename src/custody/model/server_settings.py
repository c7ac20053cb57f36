"""The settings of a server: the options of `custody serve` are derived from them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from msgspec import Meta

from custody.address import is_loopback
from custody.errors import InvalidConfig
from custody.model.limits import MOST, SMALL
from custody.model.policy import Duration
from custody.model.retention import Size
from custody.model.setting import Settings


@dataclass(frozen=True, kw_only=True)
class ServerSettings(Settings):
    host: Annotated[str, Meta(max_length=255, description="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="Port; 0 takes a free one.")] = 8080
    connections: Annotated[
        int,
        Meta(ge=1, le=SMALL, description="Connections to the database; a long poll needs none while it waits."),
    ] = 10
    max_body: Annotated[Size, Meta(description="Largest body of a request.")] = "16MB"
    max_batch: Annotated[int, Meta(ge=1, le=SMALL, description="Most messages of one request or lease.")] = MOST
    max_wait: Annotated[Duration, Meta(description="Longest long poll.")] = "60s"
    body_timeout: Annotated[Duration, Meta(ge=0.001, description="Timeout for receiving a request.")] = "30s"
    write_timeout: Annotated[
        Duration,
        Meta(ge=0.001, description="A client that reads almost nothing of its answer for this time is disconnected."),
    ] = "30s"
    max_connections: Annotated[int, Meta(ge=1, le=SMALL, description="Most client connections.")] = 10_000
    max_connections_per_address: Annotated[
        int, Meta(ge=1, le=SMALL, description="Most client connections from one address.")
    ] = 5_000
    max_buffered: Annotated[
        Size, Meta(description="Most memory for large bodies, and as much again for large answers.")
    ] = "256MB"
    grace: Annotated[Duration, Meta(description="How long a stop waits for accepted requests.")] = "30s"
    open: Annotated[
        bool, Meta(description="Serve on this machine without API keys even though all existing keys are revoked.")
    ] = False
    coalesce: Annotated[bool, Meta(description="Small requests share transactions.")] = True
    tls_cert: Annotated[Path | None, Meta(description="Serve HTTPS with this certificate (PEM).")] = None
    tls_key: Annotated[Path | None, Meta(description="Private key of the certificate (PEM).")] = None
    origins: tuple[str, ...] = ()
    """Origins of web pages that may call, in addition to pages of this server."""

    what = "a server"
    refusal = InvalidConfig

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.tls_cert is None) != (self.tls_key is None):
            raise InvalidConfig("TLS needs a certificate and its key", "Give both files.")
        for origin in self.origins:
            _require_origin(origin)

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        return is_loopback(self.host)

    @property
    def scheme(self) -> str:
        return "http" if self.tls_cert is None else "https"


def _require_origin(origin: str) -> None:
    """Refuses a text that no browser sends as an origin, and `*`, which would let every page call."""
    try:
        parts = urlsplit(origin)
        good = parts.scheme in ("http", "https") and origin == f"{parts.scheme}://{parts.netloc}" and bool(parts.netloc)
    except ValueError:
        good = False
    if not good or "*" in origin or origin != origin.lower():
        raise InvalidConfig(
            f"{origin!r} is not an origin", "Write it as browsers do: https://app.example.com, without a path."
        )
