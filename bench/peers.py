"""PgQueuer and Procrastinate on the same server, through their own Python interfaces."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from time import perf_counter

import asyncpg  # type: ignore[import-untyped]
import procrastinate
from pgqueuer import PgQueuer, Queries
from pgqueuer.types import QueueExecutionMode
from procrastinate.types import JSONDict

from bench.backlog import fill, outgoing
from bench.consuming import drainer
from bench.measure import Samples, in_turn, rate, ratio, repeat
from bench.publishing import publisher
from bench.report import Row, at_least
from bench.sizes import PAYLOAD_BYTES
from bench.stage import Stage

SIZE = 1000
WORKER_BATCH = 100


@dataclass(frozen=True)
class Peer:
    """A peer as the rows need it: publish so many jobs at once, and work off all there are."""

    publish: Callable[[int], object]
    work: Callable[[], object]


def rows(stage: Stage) -> Iterator[Row]:
    published, consumed = publishing(stage), consuming(stage)
    for name in PEERS:
        yield compared(f"publish, batch {SIZE:,}", published, name, at_least_times=5)
        yield compared(f"consume, batch {WORKER_BATCH}, handler does nothing", consumed, name)


def publishing(stage: Stage) -> dict[str, Samples]:
    batches = stage.sizes.peer_batches
    with ExitStack() as opened:
        c, _ = opened.enter_context(stage.open())
        publish = publisher(c, outgoing(SIZE))
        work: dict[str, Callable[[], object]] = {"custody": publish}
        for name, open_peer in PEERS.items():
            peer = opened.enter_context(open_peer(stage))
            peer.publish(SIZE)
            work[name] = partial(peer.publish, SIZE)
        return in_turn(stage.sizes.repetitions, {name: partial(repeated, batches, one) for name, one in work.items()})


def repeated(batches: int, publish: Callable[[], object]) -> float:
    return rate(SIZE * batches, lambda: repeat(batches, publish))


def consuming(stage: Stage) -> dict[str, Samples]:
    jobs = stage.sizes.peer_jobs
    with ExitStack() as opened:
        c, connection = opened.enter_context(stage.open())
        fill(c, connection, "orders", jobs)
        drain = drainer(c, "orders", WORKER_BATCH)
        drain()
        work: dict[str, Callable[[], float]] = {"custody": lambda: rate(jobs, drain)}
        for name, open_peer in PEERS.items():
            work[name] = partial(worked, opened.enter_context(open_peer(stage)), jobs)
        return in_turn(stage.sizes.repetitions, work)


def worked(peer: Peer, jobs: int) -> float:
    """Jobs a second."""
    peer.publish(jobs)
    start = perf_counter()
    peer.work()
    return jobs / (perf_counter() - start)


def compared(what: str, found: dict[str, Samples], peer: str, at_least_times: float | None = None) -> Row:
    return Row(
        what=f"{what}, and {peer}",
        measured=found["custody"].median,
        unit="msg/s",
        beside=peer,
        other=found[peer].median,
        ratio=ratio(found["custody"], found[peer]),
        ratio_target=None if at_least_times is None else at_least(at_least_times),
    )


@contextmanager
def pgqueuer(stage: Stage) -> Iterator[Peer]:
    payload = bytes(PAYLOAD_BYTES)
    with stage.database() as url, asyncio.Runner() as runner:
        connection = runner.run(asyncpg.connect(url))
        queries = Queries.from_asyncpg_connection(connection)
        runner.run(queries.install())

        async def publish(count: int) -> None:
            await queries.enqueue(["job"] * count, [payload] * count, [0] * count)

        async def work() -> None:
            peer = PgQueuer.from_asyncpg_connection(connection)

            @peer.entrypoint("job")
            async def handle(_: object) -> None:
                pass

            await peer.qm.run(batch_size=WORKER_BATCH, mode=QueueExecutionMode.drain)

        yield Peer(lambda count: runner.run(publish(count)), lambda: runner.run(work()))
        runner.run(connection.close())


@contextmanager
def procrastinating(stage: Stage) -> Iterator[Peer]:
    arguments: JSONDict = {"payload": "x" * PAYLOAD_BYTES}
    with stage.database() as url:
        # a worker closes the app that runs it, so it has one of its own
        producer = procrastinate.App(connector=procrastinate.SyncPsycopgConnector(conninfo=url))
        worker = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=url))

        @worker.task(name="job")
        async def handle(payload: str) -> None:
            pass

        def publish(count: int) -> Sequence[int]:
            return producer.configure_task("job").batch_defer(*[arguments] * count)

        def work() -> None:
            worker.run_worker(wait=False, concurrency=10, install_signal_handlers=False, delete_jobs="always")

        with producer.open():
            producer.schema_manager.apply_schema()
            yield Peer(publish, work)


PEERS: dict[str, Callable[[Stage], AbstractContextManager[Peer]]] = {
    "PgQueuer": pgqueuer,
    "Procrastinate": procrastinating,
}
