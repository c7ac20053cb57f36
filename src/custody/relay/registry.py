"""Finds the publisher of a destination by the name before its colon."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import entry_points

from custody.errors import InvalidArgument, PublisherUnavailable, did_you_mean
from custody.relay.addresses import Networks
from custody.relay.custody_publisher import CustodyPublisher
from custody.relay.publisher import ClaimedEvent, FunctionPublisher, Publisher, StdoutPublisher
from custody.relay.webhook import WebhookPublisher

GROUP = "custody.publishers"
"""The group of entry points for publishers of other packages: a Publisher class, or a function that returns one."""

Publishers = Mapping[str, Publisher | Callable[[ClaimedEvent], object] | str]

_BUILT_IN: dict[str, Callable[[Networks], Publisher]] = {
    "stdout": lambda _: StdoutPublisher(),
    "http": lambda networks: WebhookPublisher(allow_networks=networks),
    "https": lambda networks: WebhookPublisher(allow_networks=networks),
    "custody+postgresql": lambda networks: CustodyPublisher(allow_networks=networks),
    "custody+postgres": lambda networks: CustodyPublisher(allow_networks=networks),
    "custody+http": lambda networks: CustodyPublisher(allow_networks=networks),
    "custody+https": lambda networks: CustodyPublisher(allow_networks=networks),
}


def make_publisher(given: Publisher | Callable[[ClaimedEvent], object] | str, networks: Networks) -> Publisher:
    """Makes a publisher of a Publisher, a function of an event, the URL of a webhook, or a publisher's name.

    `networks`: the networks that a new publisher may connect to."""
    if isinstance(given, Publisher):
        return given
    if not isinstance(given, str):
        return FunctionPublisher(given)
    if given.startswith(("http://", "https://")):
        return WebhookPublisher(given, allow_networks=networks)
    if given.startswith("custody+"):
        url, _, topic = given[len("custody+") :].partition("#")
        return CustodyPublisher(url, topic or None, allow_networks=networks)
    if given in _BUILT_IN:
        return _BUILT_IN[given](networks)
    installed = {point.name: point for point in entry_points(group=GROUP)}
    if given not in installed:
        raise InvalidArgument(f"there is no publisher {given!r}", did_you_mean(given, sorted({*_BUILT_IN, *installed})))
    publisher = installed[given].load()()
    if not isinstance(publisher, Publisher):
        raise InvalidArgument(
            f"the entry point {given!r} returns a {type(publisher).__name__}",
            "It has to return a custody.relay.Publisher.",
        )
    return publisher


class Registry:
    """The publishers of a relay: those given by name ('' for events without a destination), and the built-in ones."""

    def __init__(self, given: Publishers, *, built_in: bool = True, networks: Networks | None = None) -> None:
        self._networks = networks or Networks()
        for name in given:
            if ":" in name:
                raise InvalidArgument(f"{name!r} cannot be the name of a publisher", "Leave the colon out.")
        self._found = {name: make_publisher(publisher, self._networks) for name, publisher in given.items()}
        self._installed: set[str] = set()
        if built_in:
            ours = {name: make(self._networks) for name, make in _BUILT_IN.items() if name not in given}
            self._found = {**ours, **self._found}
            self._installed = {point.name for point in entry_points(group=GROUP)} - set(self._found)

    @property
    def names(self) -> list[str]:
        return sorted({*self._found, *self._installed})

    def of(self, destination: str) -> Publisher:
        """The publisher of a destination. One of another package is made on first use: if that fails, only its own
        destinations are down."""
        name = destination.partition(":")[0]
        if name not in self._found:
            try:
                self._found[name] = make_publisher(name, self._networks)
            except Exception as error:
                raise PublisherUnavailable(f"the publisher {name} cannot be made: {error}") from error
        return self._found[name]

    def close(self) -> None:
        for publisher in self._found.values():
            publisher.close()
