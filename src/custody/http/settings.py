"""How a server is to run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from custody.address import is_loopback
from custody.errors import InvalidConfig
from custody.model.policy import Duration, seconds
from custody.model.retention import Size, size_in_bytes


@dataclass(frozen=True, kw_only=True)
class Settings:
    """`connections` is how many the requests need; waiting consumers need none. Limits are in bytes and in messages."""

    host: str = "127.0.0.1"
    port: int = 8080
    connections: int = 10
    coalesce: bool = True
    max_body: Size = "16MB"
    max_batch: int = 10_000
    max_wait: Duration = "60s"
    body_timeout: Duration = "30s"
    write_timeout: Duration = "30s"
    """A client that takes next to nothing of its answer for so long is cut off."""
    max_connections: int = 10_000
    max_connections_per_address: int = 5_000
    max_buffered: Size = "256MB"
    """What large bodies may take in memory, and as much again for large answers."""
    grace: Duration = "30s"
    open: bool = False
    """Serve without keys on the loopback although there were some, which are all revoked."""
    tls_cert: Path | None = None
    tls_key: Path | None = None
    origins: tuple[str, ...] = ()
    """Web pages from these may call; from others, only those that this server has served itself."""

    def __post_init__(self) -> None:
        for name in ("connections", "max_batch", "max_connections", "max_connections_per_address"):
            if getattr(self, name) < 1:
                raise InvalidConfig(f"{name} cannot be {getattr(self, name)!r}", "It is a whole number from 1 on.")
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
                raise InvalidConfig(f"{name} cannot be {getattr(self, name)!r}", "Give some time, such as 30s.")

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        return is_loopback(self.host)

    @property
    def scheme(self) -> str:
        return "http" if self.tls_cert is None else "https"


def _require_origin(origin: str) -> None:
    """Refuses what no browser sends as an origin; and `*`, which would let every page call."""
    try:
        parts = urlsplit(origin)
        good = parts.scheme in ("http", "https") and origin == f"{parts.scheme}://{parts.netloc}" and bool(parts.netloc)
    except ValueError:
        good = False
    if not good or "*" in origin or origin != origin.lower():
        raise InvalidConfig(
            f"{origin!r} is not an origin", "Write it as browsers do: https://app.example.com, without a path."
        )
