"""A client that was opened before a fork, used on both sides."""

from __future__ import annotations

import copy
import os
import traceback
from collections.abc import Callable

import psycopg
import pytest
from tests.http.conftest import Process

import custody
from custody import Receipt

Start = Callable[..., Process]

pytestmark = [pytest.mark.core, pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing forks here")]


@pytest.fixture
def in_a_child() -> Callable[[Callable[[], object]], None]:
    def run(what: Callable[[], object]) -> None:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                what()
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    return run


# the server is a process of its own: threads of this one would not be in the child
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
@pytest.mark.req("G11")
def test_parent_and_child_publish_under_producers_of_their_own(
    database_url: str, process: Start, db: psycopg.Connection, in_a_child: Callable[[Callable[[], object]], None]
) -> None:
    with custody.connect(process().http.url) as remote:
        remote.create_topic("orders")
        remote.publish("orders", "before")

        def child() -> None:
            assert remote.publish("orders", "child") == Receipt("orders", 0, 1)
            remote.close()

        in_a_child(child)
        assert remote.publish("orders", "parent") == Receipt("orders", 0, 2)
        assert [message.payload for message in remote.read("orders")] == ["before", "child", "parent"]
        # the child has forgotten its own and not the parent's
        assert db.execute("SELECT epoch, last_sequence FROM custody.producers").fetchall() == [(1, 1)]


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_child_has_sockets_locks_and_a_name_of_its_own(
    database_url: str, process: Start, in_a_child: Callable[[Callable[[], object]], None]
) -> None:
    url = process().http.url
    with custody.connect(url) as remote, custody.connect(url, worker="named") as named:
        remote.create_topic("orders")
        remote.publish("orders", 1)
        before = remote.worker
        copies = [copy.copy(remote), remote._impatient()]  # type: ignore[attr-defined]
        sockets = _connections(remote)
        assert sockets

        def child() -> None:
            assert not _connections(remote) & sockets
            assert (remote.worker != before, str(os.getpid()) in remote.worker, named.worker) == (True, True, "named")
            assert [one.worker for one in copies] == [remote.worker, remote.worker]
            remote.publish("orders", 2)

        with remote._own._lock:  # type: ignore[attr-defined]  # as another thread would, in the moment of the fork
            in_a_child(child)
        assert remote.worker == before
        assert remote.topic("orders").message_count == 2


def _connections(remote: custody.Custody) -> set[int]:
    """The kept connections of a client."""
    pools = remote._transport._pool.pools  # type: ignore[attr-defined]
    return {id(one) for key in pools.keys() for one in pools[key].pool.queue if one is not None}  # noqa: SIM118
