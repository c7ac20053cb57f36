"""A load of HTTP requests on raw connections: a client that costs little, so that the server is what is measured.

Run as a process of its own, `python -m bench.load HOST PORT CONNECTIONS SECONDS`, with the kind of load on stdin.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from time import perf_counter
from typing import Any

import uvloop


class Connection:
    """One keep-alive connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def ask(self, request: bytes) -> bytes:
        """The body of the answer, which has to be a good one."""
        self._writer.write(request)
        head = await self._reader.readuntil(b"\r\n\r\n")
        begin = head.index(b"content-length: ") + 16
        body = await self._reader.readexactly(int(head[begin : head.index(b"\r", begin)]))
        if not head.startswith(b"HTTP/1.1 2"):
            raise RuntimeError(f"{head!r} {body!r}")
        return body

    def close(self) -> None:
        self._writer.close()


def post(path: str, body: bytes) -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode()


def publishing(batch: int, payload: str) -> Callable[[Connection], Awaitable[int]]:
    message = {"payload": payload}
    whole = {"topic": "bench", **message} if batch == 1 else {"topic": "bench", "messages": [message] * batch}
    request = post("/messages", json.dumps(whole).encode())

    async def publish(connection: Connection) -> int:
        await connection.ask(request)
        return batch

    return publish


def consuming(batch: int) -> Callable[[Connection], Awaitable[int]]:
    request = get(f"/messages/bench?group=bench&max={batch}&wait=1s")

    async def consume(connection: Connection) -> int:
        lease = json.loads(await connection.ask(request))
        messages = received(lease)
        named = {"receipt": messages[0]["receipt"]} if batch == 1 else {"lease_id": lease["lease_id"]}
        await connection.ask(post("/messages/ack", json.dumps(named).encode()))
        return len(messages)

    return consume


def received(lease: dict[str, Any]) -> list[Any]:
    """The messages of a lease. Without any the request has waited for one, which is not what is measured."""
    messages: list[Any] = lease["messages"]
    if not messages:
        raise RuntimeError(f"the log was not long enough for this load: {lease}")
    return messages


def chained(batch: int) -> Callable[[Connection], Awaitable[int]]:
    """Each receive acks the one before."""
    path = f"/messages/bench?group=bench&max={batch}&wait=1s"
    last: dict[Connection, str] = {}

    async def receive(connection: Connection) -> int:
        ack = last.get(connection)
        lease = json.loads(await connection.ask(get(path if ack is None else f"{path}&ack={ack}")))
        received(lease)
        last[connection] = lease["lease_id"]
        return lease["settled"]["settled"] if ack is not None and "settled" in lease else 0

    return receive


async def load(
    host: str, port: int, connections: int, seconds: float, act: Callable[[Connection], Awaitable[int]]
) -> dict[str, float]:
    """What came of it: messages and requests a second, and the time of a request at p50 and p99, in milliseconds."""
    opened = [Connection(*await asyncio.open_connection(host, port)) for _ in range(connections)]
    times: list[float] = []
    messages = 0
    began = perf_counter()

    async def run(connection: Connection) -> None:
        nonlocal messages
        while perf_counter() - began < seconds:
            start = perf_counter()
            done = await act(connection)
            messages += done
            times.append(perf_counter() - start)

    await asyncio.gather(*map(run, opened))
    took = perf_counter() - began
    for connection in opened:
        connection.close()
    times.sort()
    return {
        "messages": messages / took,
        "p50": times[len(times) // 2] * 1000,
        "p99": times[int(len(times) * 0.99)] * 1000,
    }


def main() -> None:
    host, port, connections, seconds = sys.argv[1:5]
    wanted = json.load(sys.stdin)
    batch = wanted["batch"]
    acts = {
        "consume": lambda: consuming(batch),
        "chain": lambda: chained(batch),
        "publish": lambda: publishing(batch, wanted["payload"]),
    }
    act = acts[wanted["kind"]]()
    print(json.dumps(uvloop.run(load(host, int(port), int(connections), float(seconds), act))))


if __name__ == "__main__":
    main()
