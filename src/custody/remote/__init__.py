"""The client: every verb of Custody, over HTTP. `custody.connect("http://…")` opens it."""

from __future__ import annotations

from pathlib import Path

from custody.address import Address, is_remote
from custody.engine import Custody
from custody.model.policy import Duration, Policy, seconds
from custody.remote.consuming import RemoteConsuming
from custody.remote.derived import derive
from custody.remote.groups import RemoteGroups
from custody.remote.producers import RemoteProducers
from custody.remote.topics import RemoteTopics
from custody.remote.transport import ATTEMPT, Transport
from custody.wire.answers import HealthOut

__all__ = ["RemoteCustody", "is_remote", "open_remote"]

RETRY_FOR = "30s"


class RemoteCustody(RemoteTopics, RemoteProducers, RemoteGroups, RemoteConsuming):
    """The façade over HTTP. Safe for use by many threads; close it, or use it as a context manager.

    The verbs and their errors are those of a direct connection. A verb that needs the database raises
    `needs_database`.
    """


derive(RemoteCustody, Custody)


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
    """Opens the client. Fails at once if the server cannot be reached; later calls are retried for `retry_for`."""
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
