"""The addresses that a relay may connect to: public ones, and those of configured networks.

Otherwise the writer of an event could reach private services through the relay. The address is checked when the
connection is made, so that a name that resolves to another address by then is no way around it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Any, TypeVar

from custody.errors import InvalidArgument

ALLOWING = "If the relay may connect to it, allow its network (allow_networks, --allow-network)."
_EMBEDDING = [ip_network(network) for network in ("64:ff9b::/96", "::/96", "::ffff:0:0:0/96")]
"""The last 32 bits of these are an IPv4 address that a translator or tunnel on the way would connect to."""
_NOT_PUBLIC = [
    ip_network(network) for network in ("64:ff9b:1::/48", "fec0::/10", "3fff::/20", "5f00::/16", "192.0.0.0/24")
]
"""Special ranges that some versions of Python count as global: local translators, sites, documentation, routing."""


T = TypeVar("T", bound=tuple[Any, ...])


class AddressForbidden(Exception):
    """The relay may not connect to any address of the host."""


class Networks:
    """Networks that a relay may connect to in addition to public ones, such as 10.0.0.0/8 or ::1."""

    def __init__(self, allowed: Iterable[str] = ()) -> None:
        if isinstance(allowed, str):
            raise InvalidArgument(f"{allowed!r} is not a list of networks", f"Write [{allowed!r}].")
        try:
            self._allowed = [ip_network(network, strict=False) for network in allowed]
        except ValueError as error:
            raise InvalidArgument(
                f"not a network: {error}", "Write for example 10.0.0.0/8, 127.0.0.1 or fd00::/8."
            ) from error

    def permit(self, address: str) -> bool:
        """Whether the relay may connect to an address. An embedded IPv4 address has to be permitted too."""
        return all(self._permits(each) for each in _meant(ip_address(address.partition("%")[0])))

    def _permits(self, address: IPv4Address | IPv6Address) -> bool:
        special = address.is_multicast or any(address in network for network in _NOT_PUBLIC)
        public = address.is_global and not special
        return public or any(address in network for network in self._allowed)


def permitted(found: Sequence[T], host: str, networks: Networks) -> list[T]:
    """The permitted results of `getaddrinfo` for a host; `AddressForbidden` if none is permitted."""
    permitted = [one for one in found if networks.permit(str(one[4][0]))]
    if found and not permitted:
        raise AddressForbidden(f"{host} has no public address: {', '.join(sorted({str(one[4][0]) for one in found}))}")
    return permitted


def _meant(address: IPv4Address | IPv6Address) -> list[IPv4Address | IPv6Address]:
    if isinstance(address, IPv4Address):
        return [address]
    if address.ipv4_mapped is not None:
        return [address.ipv4_mapped]
    if int(address) > 1 and any(address in network for network in _EMBEDDING):  # :: and ::1 embed no IPv4 address
        return [IPv4Address(int(address) & 0xFFFFFFFF)]
    through = [address.sixtofour, *(address.teredo or ())]
    return [address, *(each for each in through if each is not None)]
