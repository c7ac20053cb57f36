"""Where a server is: the URL as it was given, without the key that may be in it."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

from custody.errors import InsecureKey, InvalidArgument

SCHEMES = ("http://", "https://")


def is_loopback(host: str) -> bool:
    """Whether a host is this machine, as far as its name tells."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_remote(url: str) -> bool:
    """Whether a URL names a server, and not a database."""
    return url.startswith(SCHEMES)


@dataclass(frozen=True, kw_only=True)
class Address:
    """A server's URL, safe to be shown, and the key to be sent to it, which is not."""

    url: str
    key: str | None = field(repr=False)

    @property
    def secure(self) -> bool:
        return self.url.startswith("https://")

    @classmethod
    def of(
        cls, url: str, *, key: str | None = None, otherwise: str | None = None, allow_insecure: bool = False
    ) -> Address:
        """The key may be the user part of the URL (`https://KEY@host`). One that is given besides counts more, and the
        one of the environment less. Without TLS a key goes no further than this machine, unless that is allowed."""
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError:
            host, port = None, None
        if not host or parts.query or parts.fragment:
            shown = url.rpartition("@")[2]  # what stands before it may be a key
            raise InvalidArgument(f"{shown!r} is not the URL of a server", "Write http://host:port, or https://host.")
        named = f"[{host}]" if ":" in host else host
        place = named if port is None else f"{named}:{port}"
        given = unquote(parts.password or parts.username or "")
        address = cls(url=f"{parts.scheme}://{place}{parts.path.rstrip('/')}", key=key or given or otherwise)
        if address.key and not address.secure and not is_loopback(host) and not allow_insecure:
            raise InsecureKey(
                f"an API key is not sent to {address.url}, where everybody on the way could read it",
                "Use https://. If the network is trusted, say allow_insecure=True, --allow-insecure or "
                "CUSTODY_ALLOW_INSECURE=1.",
            )
        return address
