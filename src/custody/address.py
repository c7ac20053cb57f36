"""The address of a server: its URL, separated from the API key that may be in it."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

from custody.errors import InsecureKey, InvalidArgument

SCHEMES = ("http://", "https://")


def is_loopback(host: str) -> bool:
    """Whether a host is localhost or a loopback address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_remote(url: str) -> bool:
    """Whether a URL is that of a server, not of a database."""
    return url.startswith(SCHEMES)


@dataclass(frozen=True, kw_only=True)
class Address:
    """The URL of a server, which may be shown, and the API key, which must not."""

    url: str
    key: str | None = field(repr=False)

    @property
    def secure(self) -> bool:
        return self.url.startswith("https://")

    @classmethod
    def of(
        cls, url: str, *, key: str | None = None, otherwise: str | None = None, allow_insecure: bool = False
    ) -> Address:
        """Parses a URL. `key` comes first, then the user part of the URL (`https://KEY@host`), then `otherwise`.
        Without TLS a key is sent only to this machine, unless `allow_insecure`."""
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError:
            host, port = None, None
        if not host or parts.query or parts.fragment:
            shown = url.rpartition("@")[2]  # the part before may be a key
            raise InvalidArgument(f"{shown!r} is not the URL of a server", "Write http://host:port, or https://host.")
        named = f"[{host}]" if ":" in host else host
        place = named if port is None else f"{named}:{port}"
        given = unquote(parts.password or parts.username or "")
        address = cls(url=f"{parts.scheme}://{place}{parts.path.rstrip('/')}", key=key or given or otherwise)
        if address.key and not address.secure and not is_loopback(host) and not allow_insecure:
            raise InsecureKey(
                f"an API key is not sent to {address.url} without encryption",
                "Use https://. If you trust the network, use allow_insecure=True, --allow-insecure or "
                "CUSTODY_ALLOW_INSECURE=1.",
            )
        return address
