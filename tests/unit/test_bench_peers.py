"""The peers of the benchmark: each takes what it is given, counts it once, and leaves nothing behind."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import psutil
import pytest
from bench.peers import own
from bench.peers.comparison import PEERS
from bench.peers.peer import Load, NotInstalled, OpenPeer
from bench.sizes import TINY
from bench.stage import Stage

QUICK = {"Custody", "pgmq"}
ALL: dict[str, OpenPeer] = {"Custody": own.opened, **PEERS}


def others() -> set[int]:
    """The processes that were started from here, but for those of PostgreSQL, which come and go."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if process.name() != "postgres":
                found.add(process.pid)
    return found


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in ALL])
def test_a_peer_delivers_what_was_published(name: str, server_url: str) -> None:
    before = others()
    try:
        with ALL[name](Stage(server_url, TINY)) as peer:
            assert peer.version
            assert peer.durability
            for groups in (2, 1):  # emptied in between
                peer.empty(groups)
                load = Load(bytes=167, batch=10, groups=groups, seconds=0.1)
                published = peer.publish(load)
                assert published.messages % 10 == 0
                assert published.rate > 0
                for group in range(groups):
                    assert peer.consume(replace(load, seconds=60), group).messages == published.messages
            peer.empty(1)
            several = Load(bytes=167, callers=4, seconds=0.1)
            published = peer.publish(several)
            assert peer.handle(replace(several, seconds=60)).messages == published.messages
    except NotInstalled as error:
        missing = str(error)
    else:
        missing = ""
    assert not missing or "install" in missing  # which the table says
    assert others() <= before
