"""The settings of a server."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from custody.address import is_loopback
from custody.errors import InvalidConfig
from custody.model.policy import Duration, seconds
from custody.model.retention import Size, size_in_bytes
from custody.wire.fields import MOST


@dataclass(frozen=True, kw_only=True)
class Settings:
    """`connections`: database connections for requests; long polls need none while they wait."""

    host: str = "127.0.0.1"
    port: int = 8080
    connections: int = 10
    coalesce: bool = True
    max_body: Size = "16MB"
    max_batch: int = MOST
    max_wait: Duration = "60s"
    body_timeout: Duration = "30s"
    write_timeout: Duration = "30s"
    """A client that reads almost nothing of its answer for this time is disconnected."""
    max_connections: int = 10_000
    max_connections_per_address: int = 5_000
    max_buffered: Size = "256MB"
    """Most memory for large bodies, and the same again for large answers."""
    grace: Duration = "30s"
    open: bool = False
    """Serve without keys on the loopback interface although all keys of the database are revoked."""
    tls_cert: Path | None = None
    tls_key: Path | None = None
    origins: tuple[str, ...] = ()
    """Origins of web pages that may call, in addition to pages of this server."""

    def __post_init__(self) -> None:
        for name in ("connections", "max_batch", "max_connections", "max_connections_per_address"):
            if getattr(self, name) < 1:
                raise InvalidConfig(f"{name} cannot be {getattr(self, name)!r}", "Give a whole number, 1 or more.")
        if not 0 <= self.port <= 65535:
            raise InvalidConfig(f"there is no port {self.port}", "Use one below 65,536; 0 takes a free one.")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise InvalidConfig("TLS needs a certificate and its key", "Give both files.")
        for origin in self.origins:
            _require_origin(origin)
        size_in_bytes(self.max_body)
        size_in_bytes(self.max_buffered)
        for given in (self.max_wait, self.grace):
            seconds(given)
        for name in ("body_timeout", "write_timeout"):
            if not seconds(getattr(self, name)):
                raise InvalidConfig(f"{name} cannot be {getattr(self, name)!r}", "Give a duration such as 30s.")

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
