"""pgmq, by the SQL and the client of its Python package; it needs no extension."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import version

from pgmq import PGMQueue, install_pgmq_from_sql
from pgmq.install import get_embedded_sql_version
from psycopg_pool import ConnectionPool

from bench.peers.callers import Step, in_threads
from bench.peers.peer import PREFETCH, Done, Load
from bench.stage import Connection, Stage, plain

VISIBILITY = 60
ALL = "everyone"


class Pgmq:
    version = f"pgmq {get_embedded_sql_version()} (client {version('pgmq')})"
    durability = "fsync at each publish and each delete"

    def __init__(self, url: str) -> None:
        self._url = url
        self._pool = ConnectionPool(url, open=True)
        self._queue = PGMQueue(pool=self._pool, init_extension=False)
        self._groups = 0

    def close(self) -> None:
        self._pool.close()

    def empty(self, groups: int) -> None:
        for group in range(self._groups):
            self._queue.drop_queue(f"group_{group}")
        for group in range(groups):
            self._queue.create_queue(f"group_{group}")
            if groups > 1:
                self._queue.bind_topic(ALL, f"group_{group}")
        self._groups = groups

    def publish(self, load: Load) -> Done:
        queue, batch = self._queue, [{"payload": "x" * load.bytes}] * load.batch

        def publisher(connection: Connection) -> Step:
            def publish() -> int:
                if load.groups > 1:
                    queue.send_batch_topic(ALL, batch, conn=connection)
                elif load.batch > 1:
                    queue.send_batch("group_0", batch, conn=connection)
                else:
                    queue.send("group_0", batch[0], conn=connection)
                return load.batch

            return publish

        return self._by_connections(load, publisher)

    def consume(self, load: Load, group: int) -> Done:
        queue, name = self._queue, f"group_{group}"

        def consumer(connection: Connection) -> Step:
            def one() -> int:
                message = queue.read(name, VISIBILITY, conn=connection)
                if message is None:
                    return 0
                queue.delete(name, message.msg_id, conn=connection)
                return 1

            def many() -> int:
                messages = queue.read_batch(name, VISIBILITY, load.batch, conn=connection)
                if messages:
                    queue.delete_batch(name, [message.msg_id for message in messages], conn=connection)
                return len(messages)

            return one if load.batch == 1 else many

        return self._by_connections(load, consumer)

    def handle(self, load: Load) -> Done:
        return self.consume(Load(bytes=load.bytes, batch=PREFETCH, callers=load.callers, seconds=load.seconds), 0)

    def _by_connections(self, load: Load, caller: Callable[[Connection], Step]) -> Done:
        """Each caller has a connection whose statements are prepared, and whose calls commit by themselves."""
        with ExitStack() as connections:
            steps = [caller(connections.enter_context(plain(self._url))) for _ in range(load.callers)]
            return in_threads(steps, load.seconds)


@contextmanager
def opened(stage: Stage) -> Iterator[Pgmq]:
    with stage.database() as url:
        install_pgmq_from_sql(dsn=url)
        peer = Pgmq(url)
        try:
            yield peer
        finally:
            peer.close()
