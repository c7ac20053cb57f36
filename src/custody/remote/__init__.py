"""The client: every verb of Custody, over HTTP. `custody.connect("http://…")` opens it."""

from __future__ import annotations

from pathlib import Path

from custody.address import Address, is_remote
from custody.engine import Custody
from custody.model.policy import Duration, Policy, seconds
from custody.remote.consuming import RemoteConsuming
from custody.remote.derived import derive
from custody.remote.grouping import RemoteGrouping
from custody.remote.producing import RemoteProducing
from custody.remote.topics import RemoteTopics
from custody.remote.transport import ATTEMPT, Transport
from custody.wire.answers import HealthOut

__all__ = ["RemoteCustody", "is_remote", "open_remote"]

RETRY_FOR = "30s"
COMPOSED = {"publish", "work", "ack", "nack", "release", "later", "settle", "extend"}
"""Verbs of the façade that call others of it: they are as good here."""


class RemoteCustody(RemoteTopics, RemoteProducing, RemoteGrouping, RemoteConsuming):
    """Custody at a server. Safe for use by many threads; close it, or use it as a context manager.

    The verbs and their errors are those of the direct connection; what needs the database itself is `needs_database`.
    """


derive(RemoteCustody, Custody, COMPOSED)


def open_remote(
    url: str,
    *,
    api_key: str | None,
    fallback_key: str | None,
    ca: str | Path | None,
    retry_for: Duration | None,
    pool_size: int,
    defaults: Policy | None,
    worker: str | None,
    allow_insecure: bool,
) -> RemoteCustody:
    """Opens the client. A server that is not there is told at once; later calls wait for it for `retry_for`."""
    transport = Transport(
        Address.of(url, key=api_key, otherwise=fallback_key, allow_insecure=allow_insecure),
        ca=ca,
        retry_for=seconds(RETRY_FOR if retry_for is None else retry_for),
        pool_size=pool_size,
    )
    try:
        transport.call("GET", "/healthz", HealthOut, worker=worker or "-", retry_for=0.0, timeout=ATTEMPT)
    except BaseException:
        transport.close()
        raise
    return RemoteCustody(transport, defaults=defaults, worker=worker)
