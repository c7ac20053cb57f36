"""How much each row does: a full run for the record, a quick one for the desk, a tiny one that only proves it runs."""

from __future__ import annotations

from dataclasses import dataclass

PAYLOAD_BYTES = 167
KEYS = 500


@dataclass(frozen=True, kw_only=True)
class Sizes:
    repetitions: int
    batches: dict[int, int]
    """How many batches of each size one repetition of a rate takes."""
    claims: int
    in_flight: int
    open_cases: int
    small_log: int
    large_log: int
    footprint_rounds: int
    held_rounds: int
    held_repetitions: int
    peer_repetitions: int
    peer_seconds: float
    """For each load of a peer."""
    worker_messages: int
    outbox_events: int
    calls: int
    http_seconds: float
    """For each load of an HTTP server."""
    sustained_seconds: float
    sustained_rate: int
    sustained_keep: int
    delayed: int
    spark_batch: int
    spark_batches: int
    spark_scale: int


FULL = Sizes(
    repetitions=5,
    batches={1: 500, 100: 400, 1000: 200},
    claims=200,
    in_flight=10_000,
    open_cases=200_000,
    small_log=100_000,
    large_log=10_000_000,
    footprint_rounds=100,
    held_rounds=10_000,
    held_repetitions=3,
    peer_repetitions=3,
    peer_seconds=0.4,
    worker_messages=50_000,
    outbox_events=100_000,
    calls=300,
    http_seconds=5,
    sustained_seconds=60,
    sustained_rate=100_000,
    sustained_keep=2**30,
    delayed=1_000_000,
    spark_batch=100_000,
    spark_batches=8,
    spark_scale=1_000_000,
)

QUICK = Sizes(
    repetitions=3,
    batches={1: 200, 100: 150, 1000: 60},
    claims=60,
    in_flight=10_000,
    open_cases=200_000,
    small_log=100_000,
    large_log=1_000_000,
    footprint_rounds=30,
    held_rounds=2_000,
    held_repetitions=1,
    peer_repetitions=1,
    peer_seconds=0.2,
    worker_messages=20_000,
    outbox_events=50_000,
    calls=100,
    http_seconds=1,
    sustained_seconds=20,
    sustained_rate=100_000,
    sustained_keep=2**28,
    delayed=1_000_000,
    spark_batch=100_000,
    spark_batches=4,
    spark_scale=400_000,
)

TINY = Sizes(
    repetitions=1,
    batches={1: 5, 100: 3, 1000: 2},
    claims=5,
    in_flight=1_000,
    open_cases=1_000,
    small_log=5_000,
    large_log=10_000,
    footprint_rounds=3,
    held_rounds=20,
    held_repetitions=1,
    peer_repetitions=1,
    peer_seconds=0.02,
    worker_messages=500,
    outbox_events=2_000,
    calls=5,
    http_seconds=0.5,
    sustained_seconds=3,
    sustained_rate=2_000,
    sustained_keep=2**21,
    delayed=2_000,
    spark_batch=1_000,
    spark_batches=1,
    spark_scale=4_000,
)
