"""The product's client, under the same load as the ceiling's and the peers' clients.

    python -m benchmarks.product_client MODE+URI ENTRY_BYTES IN_FLIGHT LEDGERS WARM_UP SECONDS READ KIND RATE

Ledgers have E = Qw = 3 and Qa = 2, and are deleted in the end. In mode `growing` each ledger is written for
the whole run. In mode `steady` a ledger is followed by another after every 256 MiB, and then deleted. The
bookies therefore reclaim as much space as they take. The measurement begins on used bookies: they have files
to recycle, and write into one. Prints `ready`, `warm`, and the figures as one line of JSON. KIND and RATE are
those of `benchmarks.peers.workloads`. It asks its caller for `kill N` or `evict` as the peers' drivers do.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import json
import struct
import sys
import time
from typing import TYPE_CHECKING

import uvloop

import client_aio
from benchmarks.load import Add, Figures, Load, cpu_seconds, drive
from benchmarks.peers.workloads import COLD, FAILOVER, FOLLOW, LOGS, READ, TAKEOVER, WRITE
from bookie_aio.wire.messages import Done, Info
from client_aio.bookies.connection import connect

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from metadata.access.bookies import BookieRecord

ROLL_BYTES = 256 << 20
_LEDGERS_STEADY = 4
_LEDGERS_MAX = 60
_SEGMENTS_BYTES = 512 << 20  # more than the segment that is written to and the next one
_CALL_TIMEOUT_S = 10.0
_CHUNK = bytes(64 << 10)
_STAMP = struct.Struct("d")
_OPENED_AT_ONCE = 50
_STRAGGLERS_S = 1.0
_SEEN_MIN = 0.99
_WARM_PART = 10
_KILLED = "kill 1"
"""All three bookies are in the ensemble, so one is as good as another."""


class Writers:
    """The ledgers that are written, one add to each in turn."""

    def __init__(self, client: client_aio.Client, load: Load, *, is_steady: bool) -> None:
        self._client = client
        self._entry_bytes = load.entry_bytes
        self._roll_entries = max(1, ROLL_BYTES // load.entry_bytes) if is_steady else sys.maxsize
        self._count = load.ledgers
        self._adds: list[Add] = []
        self._writers: list[client_aio.LedgerWriter] = []
        self._left: list[int] = []
        self._next = 0
        self._rolling: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Writers:
        self._writers = [await self._create() for _ in range(self._count)]
        self._adds = [writer.add_entry for writer in self._writers]
        # Not all at once: each has a different share of its first round behind it.
        self._left = [self._roll_entries * (n + 1) // self._count for n in range(self._count)]
        client_aio.tune_gc()
        return self

    async def __aexit__(self, *exception: object) -> None:
        while self._rolling:
            await asyncio.wait(self._rolling)
        for writer in self._writers:
            await self._end(writer)

    def add_for(self, count: int) -> Add:
        """Return what adds the next entries: the ledger itself where there is but one."""
        if self._count > 1:
            return self._add
        self._left[0] -= count
        if self._left[0] <= 0:
            self._roll(0)
        return self._adds[0]

    def _add(self, payload: bytes) -> asyncio.Future[int]:
        number = self._next
        self._next = number + 1 if number + 1 < self._count else 0
        self._left[number] -= 1
        if not self._left[number]:
            self._roll(number)
        return self._adds[number](payload)

    def _roll(self, number: int) -> None:
        self._left[number] = self._roll_entries

        async def roll() -> None:
            new = await self._create()
            old, self._writers[number] = self._writers[number], new
            self._adds[number] = new.add_entry
            await self._end(old)

        task = asyncio.create_task(roll())
        self._rolling.add(task)
        task.add_done_callback(self._rolling.discard)

    async def _create(self) -> client_aio.LedgerWriter:
        return await self._client.create_ledger(ensemble_size=3, write_quorum=3, ack_quorum=2)

    async def _end(self, writer: client_aio.LedgerWriter) -> None:
        await writer.close()
        await self._client.delete_ledger(writer.ledger_id)


async def write(client: client_aio.Client, load: Load, *, is_steady: bool) -> None:
    """Measure adds."""
    if is_steady:
        await use(client)
    async with Writers(client, load, is_steady=is_steady) as writers:
        print("ready", flush=True)
        figures = await drive(writers.add_for, load)
        # Before the ledgers are deleted, so that the deletion is not measured.
        print(json.dumps(figures.to_dict()), flush=True)


async def write_logs(client: client_aio.Client, load: Load) -> None:
    """Measure appends to named logs, one to each in turn."""
    logs: list[client_aio.LogWriter] = []
    for first in range(0, load.ledgers, _OPENED_AT_ONCE):
        numbers = range(first, min(load.ledgers, first + _OPENED_AT_ONCE))
        logs += await asyncio.gather(*(client.open_log(f"bench-{number}") for number in numbers))
    client_aio.tune_gc()
    turn = 0

    def append(payload: bytes) -> asyncio.Future[client_aio.Position]:
        nonlocal turn
        log = logs[turn]
        turn = turn + 1 if turn + 1 < load.ledgers else 0
        return log.append(payload)

    print("ready", flush=True)
    figures = await drive(lambda _: append, load)
    print(json.dumps(figures.to_dict()), flush=True)
    await asyncio.gather(*(log.abort() for log in logs))


async def ask(what: str) -> None:
    """Have the caller do something, and wait until it is done."""
    print(what, flush=True)
    if not await asyncio.to_thread(sys.stdin.readline):
        raise RuntimeError(f"nobody answered: {what}")


async def failover(client: client_aio.Client, load: Load) -> None:
    """Measure the longest time without an acknowledgement while a bookie is killed."""
    async with Writers(client, load, is_steady=False) as writers:
        last_at, longest_s = time.perf_counter(), 0.0

        def acknowledged(future: asyncio.Future[int]) -> None:
            nonlocal last_at, longest_s
            if future.exception() is None:
                now = time.perf_counter()
                longest_s, last_at = max(longest_s, now - last_at), now

        def add_for(count: int) -> Add:
            add = writers.add_for(count)

            def noted(payload: bytes) -> asyncio.Future[int]:
                future = add(payload)
                future.add_done_callback(acknowledged)
                return future

            return noted

        async def kill() -> None:
            nonlocal longest_s
            await asyncio.sleep(load.warm_up_s + load.seconds / 10)
            longest_s = 0.0
            await ask(_KILLED)

        print("ready", flush=True)
        killing = asyncio.create_task(kill())
        figures = await drive(add_for, load)
        await killing
        longest_s = max(longest_s, time.perf_counter() - last_at)
        print(json.dumps({**figures.to_dict(), "pause_ms": 1e3 * longest_s}), flush=True)


async def takeover(client: client_aio.Client, uri: str, load: Load) -> None:
    """Measure the time to recover a dead writer's ledger, with a bookie killed, and to append to another."""
    async with client_aio.connect(uri) as other:
        writer = await client.create_ledger(ensemble_size=3, write_quorum=3, ack_quorum=2)
        print("ready", flush=True)
        added = await drive(lambda _: writer.add_entry, load)
        await ask(_KILLED)
        began = time.perf_counter()
        await other.open_ledger(writer.ledger_id, recover=True)
        following = await other.create_ledger(ensemble_size=3, write_quorum=3, ack_quorum=2)
        await following.add_entry(b"x")
        took_ms = 1e3 * (time.perf_counter() - began)
        figures = added.to_dict() | dict.fromkeys(("p50_ms", "p99_ms", "p999_ms", "pause_ms"), took_ms)
        print(json.dumps({**figures, "adds": 1, "failed": 0}), flush=True)


async def follow(client: client_aio.Client, uri: str, load: Load) -> None:
    """Measure the age of entries when a follower gets them; entries are added at a fixed rate."""
    writer = await client.create_ledger(ensemble_size=3, write_quorum=3, ack_quorum=2)
    latencies, padding, failed = array.array("d"), bytes(load.entry_bytes - _STAMP.size), 0
    began = time.perf_counter()
    warm = began + load.warm_up_s

    async def tail(reader: client_aio.LedgerReader) -> None:
        async with contextlib.aclosing(reader.tail()) as entries:
            async for entry in entries:
                (sent,) = _STAMP.unpack_from(entry.data)
                if sent >= warm:
                    latencies.append(time.perf_counter() - sent)

    def done(future: asyncio.Future[int]) -> None:
        nonlocal failed
        failed += future.exception() is not None

    async with client_aio.connect(uri) as follower:
        tailing = asyncio.create_task(tail(await follower.open_ledger(writer.ledger_id)))
        print("ready", flush=True)
        count = measured = 0
        cpu_before = 0.0
        end = warm + load.seconds
        while (due := began + count / load.rate) < end:
            if (wait_s := due - time.perf_counter()) > 0:
                await asyncio.sleep(wait_s)
            if due >= warm:
                if not measured:
                    cpu_before = cpu_seconds()
                    print("warm", flush=True)
                measured += 1
            writer.add_entry(_STAMP.pack(time.perf_counter()) + padding).add_done_callback(done)
            count += 1
        cpu = cpu_seconds() - cpu_before
        await writer.close()
        async with asyncio.timeout(_STRAGGLERS_S):
            await tailing
    if len(latencies) < _SEEN_MIN * measured:
        raise RuntimeError(f"saw {len(latencies)} of {measured} entries")
    figures = Figures.of_latencies(latencies, load.seconds, cpu, failed, count)
    print(json.dumps(figures.to_dict()), flush=True)


async def use(client: client_aio.Client) -> None:
    """Write ledgers and delete them until no bookie makes new files for it: all are recycled ones.

    How many files lie spare at one moment says little: the next segments take them.
    """
    most: dict[str, int] = {}
    steady = 0
    for _ in range(_LEDGERS_MAX):
        await _write_and_delete(client, ROLL_BYTES)
        files = {name: await _files(record) for name, record in client.bookies.items()}
        is_steady = all(count <= most.get(name, 0) for name, count in files.items())
        steady = steady + 1 if is_steady else 0
        if steady == _LEDGERS_STEADY:
            break
        most = {name: max(count, most.get(name, 0)) for name, count in files.items()}
    else:
        raise RuntimeError(
            f"{_LEDGERS_MAX} ledgers were written and deleted, and bookies still take new files"
        )
    await _write_and_delete(client, _SEGMENTS_BYTES)


async def _write_and_delete(client: client_aio.Client, size: int) -> None:
    async with client.create_ledger(ensemble_size=3, write_quorum=3, ack_quorum=2) as writer:
        await writer.add_entries(_CHUNK for _ in range(size // len(_CHUNK)))
    await client.delete_ledger(writer.ledger_id)


async def _files(bookie: BookieRecord) -> int:
    """Return how many files of segments a bookie has, in use or spare."""
    address = bookie.addresses[0]
    connection = await connect(address, bookie_id="", instance_id="", timeout_s=_CALL_TIMEOUT_S)
    _, body = await connection.call(Info(), Done, timeout_s=_CALL_TIMEOUT_S)
    connection.close()
    storage = json.loads(bytes(body))["storage"]
    return int(storage["segments"]["count"]) + int(storage["disk"]["spare_files"])


async def read(client: client_aio.Client, load: Load) -> None:
    """Measure reading a ledger from end to end, one reader, every entry an object of bytes.

    By batches, as in BookKeeper's client: its futures are of the entries of a range.
    """
    payload = bytes(load.entry_bytes)
    async with client.create_ledger(ensemble_size=3, write_quorum=3, ack_quorum=2) as writer:
        print("ready", flush=True)
        await writer.add_entries(payload for _ in range(load.read_entries))
    reader = await client.open_ledger(writer.ledger_id)

    async def first(count: int) -> None:
        size = 0
        async with contextlib.aclosing(reader.read_batches(0, count - 1)) as batches:
            async for batch in batches:
                for entry in batch:
                    size += len(entry.data)
        if size != count * load.entry_bytes:
            raise RuntimeError(f"read {size} bytes of {count * load.entry_bytes}")

    until = time.perf_counter() + load.warm_up_s
    while time.perf_counter() < until:
        # Cold is what bookies read, not the code of either side.
        await first(load.read_entries if load.kind == READ else load.read_entries // _WARM_PART)
    if load.kind == COLD:
        await ask("evict")
    print("warm", flush=True)
    passes = array.array("d")
    cpu_before, started = cpu_seconds(), time.perf_counter()
    # A second pass would read what the first one has brought into memory.
    while (now := time.perf_counter()) < started + (load.seconds if load.kind == READ else 0.0) or not passes:
        await first(load.read_entries)
        passes.append(time.perf_counter() - now)
    elapsed, cpu, count = time.perf_counter() - started, cpu_seconds() - cpu_before, len(passes)
    await client.delete_ledger(writer.ledger_id)
    # The latencies are those of whole passes, the rest is for an entry.
    figures = Figures.of_latencies(passes, elapsed, cpu, 0, 0).to_dict()
    entries = count * load.read_entries
    figures |= {"adds": entries, "adds_per_s": entries / elapsed, "client_us": 1e6 * cpu / entries}
    print(json.dumps(figures), flush=True)


async def main() -> None:
    mode, uri = sys.argv[1].split("+", 1)
    load = Load.of_arguments(sys.argv[2:])
    async with client_aio.connect(uri) as client:
        kinds: dict[str, Callable[[], Coroutine[None, None, None]]] = {
            WRITE: lambda: write(client, load, is_steady=mode == "steady"),
            LOGS: lambda: write_logs(client, load),
            READ: lambda: read(client, load),
            COLD: lambda: read(client, load),
            FOLLOW: lambda: follow(client, uri, load),
            FAILOVER: lambda: failover(client, load),
            TAKEOVER: lambda: takeover(client, uri, load),
        }
        await kinds[load.kind]()


if __name__ == "__main__":
    uvloop.run(main())
