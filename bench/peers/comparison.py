"""Custody and its peers in turn: batches, many callers, fan-out. One figure of Custody beside that of each peer."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial

from bench.measure import Samples, in_turn, ratio
from bench.peers import nats, own, pgmq, pgqueuer, procrastinate, rabbitmq, redis
from bench.peers.peer import Load, NotInstalled, OpenPeer, Peer
from bench.report import Row, at_least
from bench.sizes import PAYLOAD_BYTES
from bench.stage import Stage

OWN = "Custody"
PEERS: dict[str, OpenPeer] = {
    "pgmq": pgmq.opened,
    "PgQueuer": pgqueuer.opened,
    "Procrastinate": procrastinate.opened,
    "Redis, fsync always": redis.always,
    "Redis, every second": redis.everysec,
    "NATS, fsync always": nats.always,
    "NATS, as it comes": nats.usual,
    "RabbitMQ": rabbitmq.opened,
}
PAYLOADS = (PAYLOAD_BYTES, 1000)
BATCHES = (1, 10, 100, 1000)
CALLERS = (1, 8, 64)
GROUPS = (2, 8)
FILLING = 1000
TIMES = 5
WANTED = {(f"publish, {PAYLOAD_BYTES} bytes, batch 1,000", name) for name in ("PgQueuer", "Procrastinate")}
"""Where as many messages as that of a peer are wanted."""

Measure = Callable[[Peer], tuple[float, ...]]


def rows(stage: Stage) -> Iterator[Row]:
    missing: dict[str, str] = {}
    with ExitStack() as stack:
        peers: dict[str, Peer] = {OWN: stack.enter_context(own.opened(stage))}
        for name, opened in PEERS.items():
            try:
                peers[name] = stack.enter_context(opened(stage))
            except NotInstalled as error:
                missing[name] = str(error)
        stage.notes += [f"{name}: {peer.version}; {peer.durability}" for name, peer in peers.items()]
        stage.notes += [f"{name}: {how}" for name, how in missing.items()]
        for what, measure in _loads(stage.sizes.peer_seconds):
            yield from _compared(what, measure, peers, missing, stage.sizes.peer_repetitions)


def _loads(seconds: float) -> Iterator[tuple[tuple[str, ...], Measure]]:
    """What is measured, and how. A measurement may give two figures."""
    for size in PAYLOADS:
        for batch in BATCHES:
            load = Load(bytes=size, batch=batch, seconds=seconds)
            names = (f"publish, {size:,} bytes, batch {batch:,}", f"consume, {size:,} bytes, batch {batch:,}")
            yield names, partial(_in_and_out, load)
    for callers in CALLERS:
        load = Load(bytes=PAYLOAD_BYTES, callers=callers, seconds=seconds)
        plural = "s" * (callers > 1)
        names = (
            f"publish one at a time, {callers} producer{plural}",
            f"handle one at a time, {callers} handler{plural}",
        )
        yield names, partial(_each, load)
    for groups in GROUPS:
        load = Load(bytes=PAYLOAD_BYTES, batch=100, groups=groups, seconds=seconds)
        yield (f"publish, and consume by {groups} groups, batch 100",), partial(_fanned_out, load)


def _in_and_out(load: Load, peer: Peer) -> tuple[float, ...]:
    peer.empty(1)
    return peer.publish(load).rate, peer.consume(load, 0).rate


def _each(load: Load, peer: Peer) -> tuple[float, ...]:
    peer.empty(1)
    published = peer.publish(load).rate
    peer.publish(Load(bytes=load.bytes, batch=FILLING, seconds=load.seconds))
    return published, peer.handle(load).rate


def _fanned_out(load: Load, peer: Peer) -> tuple[float, ...]:
    """Messages a second that are published once and consumed by all groups, one after the other."""
    peer.empty(load.groups)
    rates = [peer.publish(load).rate, *(peer.consume(load, group).rate for group in range(load.groups))]
    return (1 / sum(1 / rate for rate in rates) if all(rates) else 0.0,)


def _compared(
    names: tuple[str, ...], measure: Measure, peers: Mapping[str, Peer], missing: Mapping[str, str], repetitions: int
) -> Iterator[Row]:
    found = {name: [Samples() for _ in names] for name in peers}

    def take(name: str) -> float:
        os.sync()  # what another one left to be written is not to slow this one
        for samples, figure in zip(found[name], measure(peers[name]), strict=True):
            samples.values.append(figure)
        return 0.0

    in_turn(repetitions, {name: partial(take, name) for name in peers})
    for number, what in enumerate(names):
        ours = found[OWN][number]
        for name in PEERS:
            theirs = None if name in missing else found[name][number]
            yield Row(
                what=what,
                measured=ours.median,
                unit="msg/s",
                beside=name,
                other=None if theirs is None else theirs.median,
                ratio=ratio(ours, theirs) if theirs is not None and all(theirs.values) else None,
                ratio_target=at_least(TIMES) if (what, name) in WANTED else None,
                note=missing.get(name),
            )
