"""Health, readiness and metrics of the server."""

from __future__ import annotations

import asyncio

import msgspec

from custody.errors import ServerStopping
from custody.http.answer import Answer
from custody.http.call import Call
from custody.http.operation import Table
from custody.monitoring.shared import CONTENT_TYPE
from custody.wire.answers import HealthOut

table = Table("operating")


@table.operation("GET", "/healthz", answer=HealthOut, open=True)
async def healthz(_call: Call) -> Answer:
    """The server runs."""
    return Answer(msgspec.json.encode(HealthOut("ok")))


@table.operation("GET", "/readyz", answer=HealthOut, open=True)
async def readyz(call: Call) -> Answer:
    """The server is ready: its database answers, and it is not stopping."""
    if call.state.stopping:
        raise ServerStopping(remedy="Use another server.")
    await call.state.ping()
    return Answer(msgspec.json.encode(HealthOut("ready")))


@table.operation("GET", "/metrics", answer=str, media_type="text/plain")
async def metrics(call: Call) -> Answer:
    """The counters of the server and the figures of all groups, for Prometheus.

    `custody_up` is 0 if the database does not answer; the counters of the server are there anyway.
    """
    overview = await call.state.database_metrics.overview()
    # in a thread, because it takes some milliseconds with hundreds of groups
    return Answer(await asyncio.to_thread(call.state.metrics.exposition, overview), content_type=CONTENT_TYPE.encode())
