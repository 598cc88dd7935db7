"""The client process of the suite: one load, described by a JSON object, on one cluster.

    python -m benchmarks.suite.client URI '{"mode": "closed", "entry_bytes": 1024, …}'

Modes:

- `closed` keeps a window full.
- `open` adds at a fixed rate, and counts an add's latency from the moment it was due. A pause therefore
  counts in full for every add that it delays.
- `tail_writer` and `tail_reader` carry the time of writing in each entry.
- `fill` stores entries and leaves them.
- `read` reads a ledger from end to end.
- `soak` adds at a fixed rate to ledgers that it closes and deletes all the time.

Prints one line of JSON; `soak` and `tail_writer` print some before.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import json
import resource
import struct
import sys
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import uvloop

import client_aio
from benchmarks.load import Figures, Load, cpu_seconds, drive
from bookie_aio.wire.messages import Done, Ping
from client_aio.bookies.connection import connect

_STAMP = struct.Struct("<q")
_TICK_S = 0.001  # the finest that uvloop has: less is a busy loop
_BURST_MAX = 512
"""The most adds in one event-loop iteration. A late generator that adds all due at once gets no answers
meanwhile. Client and bookies would then wait for each other in turn, and it would never catch up."""
_IN_FLIGHT_BYTES_MAX = 64 << 20
PERCENTILES = (0, 10, 25, 50, 75, 90, 95, 99, 99.5, 99.9, 99.99, 100)


@dataclass(frozen=True)
class Spec:
    """The load. Rates are adds per second over all ledgers, `ensemble` is E, Qw and Qa."""

    mode: str
    entry_bytes: int = 1024
    in_flight: int = 1000
    rate: float = 0.0
    seconds: float = 5.0
    warm_up_s: float = 1.0
    ledgers: int = 1
    ensemble: tuple[int, int, int] = (3, 3, 2)
    entries: int = 0
    ledger_id: int = 0
    per_entry: bool = True

    @property
    def sizes(self) -> dict[str, int]:
        """Return the quorums by the names that `create_ledger` has for them."""
        names = ("ensemble_size", "write_quorum", "ack_quorum")
        return dict(zip(names, self.ensemble, strict=True))


def spread(latencies_s: array.array[float]) -> dict[str, float]:
    """Return the percentiles of latencies, in ms, by name; sorts a copy."""
    found = sorted(latencies_s)
    last = len(found) - 1
    return {f"p{each:g}": 1e3 * found[min(last, int(len(found) * each / 100))] for each in PERCENTILES}


def histogram(latencies_s: array.array[float]) -> str | None:
    """Return an HDR histogram of the latencies in µs, encoded; None where hdrhistogram is not installed."""
    try:
        from hdrh.histogram import HdrHistogram
    except ImportError:
        return None
    found = HdrHistogram(1, 3_600_000_000, 3)
    counts: dict[int, int] = {}
    for latency in latencies_s:
        key = int(latency * 1e6)
        counts[key] = counts.get(key, 0) + 1
    for value, count in counts.items():
        found.record_value(max(1, value), count)
    encoded: bytes = found.encode()
    return encoded.decode()


async def make_writers(client: client_aio.Client, spec: Spec) -> list[client_aio.LedgerWriter]:
    """Create the ledgers, some at a time."""
    writers: list[client_aio.LedgerWriter] = []
    while len(writers) < spec.ledgers:
        some = min(100, spec.ledgers - len(writers))
        writers += await asyncio.gather(*(client.create_ledger(**spec.sizes) for _ in range(some)))
    return writers


def in_turn(writers: list[client_aio.LedgerWriter]) -> Any:
    """Return a function that adds to one writer after the other."""
    if len(writers) == 1:
        return writers[0].add_entry
    adds, at, count = [writer.add_entry for writer in writers], -1, len(writers)

    def add(payload: bytes) -> asyncio.Future[int]:
        nonlocal at
        at = at + 1 if at + 1 < count else 0
        return adds[at](payload)

    return add


async def closed(client: client_aio.Client, spec: Spec) -> dict[str, Any]:
    """Keep a window full."""
    writers = await make_writers(client, spec)
    load = Load(spec.entry_bytes, spec.in_flight, spec.seconds, spec.warm_up_s, spec.ledgers)
    kept: list[array.array[float]] = []
    add = in_turn(writers)
    figures = await drive(lambda _: add, load, kept.append)
    return {**figures.to_dict(), "latency_ms": spread(kept[0]), "hdr": histogram(kept[0])}


async def open_loop(client: client_aio.Client, spec: Spec) -> dict[str, Any]:
    """Add at a fixed rate, whether answers arrive or not."""
    writers = await make_writers(client, spec)
    add, payload = in_turn(writers), b"x" * spec.entry_bytes
    latencies, failed, issued = array.array("d"), 0, 0
    warm_up, total = int(spec.rate * spec.warm_up_s), int(spec.rate * (spec.warm_up_s + spec.seconds))
    now, loop = time.perf_counter, asyncio.get_running_loop()
    outstanding = 0
    ended = loop.create_future()

    def done(due: float, is_counted: bool, future: asyncio.Future[int]) -> None:
        nonlocal failed, outstanding
        outstanding -= 1
        if future.exception() is not None:
            failed += 1
        elif is_counted:
            latencies.append(now() - due)
        if issued == total and not outstanding and not ended.done():
            ended.set_result(None)

    cpu_before, started = cpu_seconds(), now()
    while issued < total:
        due_by_now = min(total, int((now() - started) * spec.rate) + 1)
        # What there is no room for is late, and counted from when it was due all the same.
        room = max(0, _IN_FLIGHT_BYTES_MAX // spec.entry_bytes - outstanding)
        until = min(due_by_now, issued + room, issued + _BURST_MAX)
        is_late = until == issued + _BURST_MAX
        for number in range(issued, until):
            outstanding += 1
            issued += 1
            add(payload).add_done_callback(partial(done, started + number / spec.rate, number >= warm_up))
        await asyncio.sleep(0 if is_late else _TICK_S)
    await ended
    elapsed, cpu = now() - started - spec.warm_up_s, cpu_seconds() - cpu_before
    figures = Figures.of_latencies(latencies, elapsed, cpu, failed, total)
    return {**figures.to_dict(), "latency_ms": spread(latencies), "hdr": histogram(latencies)}


async def tail_writer(client: client_aio.Client, spec: Spec) -> dict[str, Any]:
    """Add entries that carry the time, at a fixed rate."""
    (writer,) = await make_writers(client, spec)
    print(json.dumps({"ledger_id": writer.ledger_id}), flush=True)
    padding = bytes(spec.entry_bytes - _STAMP.size)
    started, issued = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - started) < spec.warm_up_s + spec.seconds:
        while issued <= elapsed * spec.rate:
            writer.add_entry(_STAMP.pack(time.monotonic_ns()) + padding)
            issued += 1
        await asyncio.sleep(_TICK_S)
    await writer.close()
    return {"adds": issued}


async def tail_reader(client: client_aio.Client, spec: Spec) -> dict[str, Any]:
    """Follow a ledger to its end, and compare the time in each entry with that of its arrival."""
    reader = await client.open_ledger(spec.ledger_id)
    latencies, begun = array.array("d"), time.monotonic_ns() + int(1e9 * spec.warm_up_s)
    async with contextlib.aclosing(reader.tail(0)) as entries:
        async for entry in entries:
            (stamp,) = _STAMP.unpack_from(entry.data)
            if stamp >= begun:
                latencies.append((time.monotonic_ns() - stamp) / 1e9)
    return {"entries": len(latencies), "latency_ms": spread(latencies), "hdr": histogram(latencies)}


async def fill(client: client_aio.Client, spec: Spec) -> dict[str, Any]:
    """Store entries, the same number in each ledger, and close the ledgers."""
    payload, each = b"x" * spec.entry_bytes, max(1, spec.entries // spec.ledgers)
    started, ids = time.perf_counter(), []
    for first in range(0, spec.ledgers, 100):
        some = Spec(**{**vars(spec), "ledgers": min(100, spec.ledgers - first)})
        writers = await make_writers(client, some)
        # In turn, so that the ledgers lie interleaved on the disk.
        for begun in range(0, each, 100):
            count = min(100, each - begun)
            await asyncio.gather(*(w.add_entries(payload for _ in range(count)) for w in writers))
        for writer in writers:
            await writer.close()
        ids += [writer.ledger_id for writer in writers]
    return {"entries": each * spec.ledgers, "seconds": time.perf_counter() - started, "ledger_ids": ids[:100]}


async def read(client: client_aio.Client, spec: Spec) -> dict[str, Any]:
    """Read a ledger again and again, entry by entry or in batches."""
    reader = await client.open_ledger(spec.ledger_id)
    last, entries, size = reader.last_add_confirmed, 0, 0
    cpu_before, started = cpu_seconds(), time.perf_counter()
    while time.perf_counter() < started + spec.seconds:
        if spec.per_entry:
            async with contextlib.aclosing(reader.read(0, last)) as stream:
                async for entry in stream:
                    entries += 1
                    size += len(entry.data)
        else:
            async with contextlib.aclosing(reader.read_batches(0, last)) as batches:
                async for batch in batches:
                    entries += len(batch)
                    size += len(batch.buffer)
    elapsed, cpu = time.perf_counter() - started, cpu_seconds() - cpu_before
    return {
        "entries_per_s": entries / elapsed,
        "mb_per_s": size / elapsed / 1e6,
        "client_us": 1e6 * cpu / entries,
    }


async def connect_many(client: client_aio.Client, spec: Spec) -> dict[str, Any]:
    """Hold connections to one bookie, and ping them all in turn, a thousand a second."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    bookie = client.bookies["b1"]
    started, held = time.perf_counter(), []
    while len(held) < spec.entries:
        some = min(100, spec.entries - len(held))
        held += await asyncio.gather(
            *(connect(bookie.addresses[0], bookie_id="b1", instance_id="", timeout_s=60) for _ in range(some))
        )
    print(json.dumps({"connected": len(held), "connect_s": time.perf_counter() - started}), flush=True)
    latencies = array.array("d")
    until = time.perf_counter() + spec.seconds
    while time.perf_counter() < until:
        for connection in held:
            before = time.perf_counter()
            await connection.call(Ping(), Done, timeout_s=60)
            latencies.append(time.perf_counter() - before)
            await asyncio.sleep(0.001)
            if time.perf_counter() >= until:
                break
    for connection in held:
        connection.close()
    return {"pings": len(latencies), "latency_ms": spread(latencies)}


async def soak(client: client_aio.Client, spec: Spec) -> dict[str, Any]:
    """Add at a fixed rate; each ledger is closed after `entries` adds, and deleted two ledgers later."""
    payload, latencies, failed, issued = b"x" * spec.entry_bytes, array.array("d"), 0, 0
    now = time.perf_counter
    (writer,) = await make_writers(client, spec)
    left, kept, ending = spec.entries, [writer.ledger_id], set[asyncio.Task[None]]()
    deleted = 0

    def done(due: float, future: asyncio.Future[int]) -> None:
        nonlocal failed
        if future.exception() is None:
            latencies.append(now() - due)
        else:
            failed += 1

    async def end(old: client_aio.LedgerWriter, oldest: int | None) -> None:
        nonlocal deleted
        await old.close()
        if oldest is not None:
            await client.delete_ledger(oldest)
            deleted += 1

    making: asyncio.Future[client_aio.LedgerWriter] | None = None
    started = reported = now()
    while (elapsed := now() - started) < spec.seconds:
        due_by_now = int(elapsed * spec.rate) + 1
        for number in range(issued, min(due_by_now, issued + _BURST_MAX)):
            if writer.bytes_in_flight > _IN_FLIGHT_BYTES_MAX:
                break  # late, and counted from when it was due all the same
            writer.add_entry(payload).add_done_callback(partial(done, started + number / spec.rate))
            issued, left = issued + 1, left - 1
            if making is None and left < spec.entries // 2:
                making = asyncio.ensure_future(client.create_ledger(**spec.sizes))
            if left <= 0 and making is not None and making.done():
                oldest = kept.pop(0) if len(kept) > 2 else None
                task = asyncio.create_task(end(writer, oldest))
                ending.add(task)
                task.add_done_callback(ending.discard)
                writer, making, left = making.result(), None, spec.entries
                kept.append(writer.ledger_id)
        if now() - reported >= 1 and latencies:
            line = {"at_s": round(elapsed, 1), "adds": issued, "failed": failed, "deleted": deleted}
            print(json.dumps({**line, "latency_ms": spread(latencies)}), flush=True)
            del latencies[:]
            reported = now()
        is_late = issued < due_by_now and writer.bytes_in_flight <= _IN_FLIGHT_BYTES_MAX
        await asyncio.sleep(0 if is_late else _TICK_S)
    await asyncio.gather(*ending)
    await writer.close()
    return {"done": True, "adds": issued, "failed": failed, "deleted": deleted}


MODES = {
    "closed": closed,
    "open": open_loop,
    "tail_writer": tail_writer,
    "tail_reader": tail_reader,
    "fill": fill,
    "read": read,
    "soak": soak,
    "connect_many": connect_many,
}


async def main() -> None:
    uri, spec = sys.argv[1], Spec(**json.loads(sys.argv[2]))
    async with client_aio.connect(uri) as client:
        found = await MODES[spec.mode](client, spec)
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    uvloop.run(main())
